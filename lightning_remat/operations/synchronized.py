"""`nn.SyncBatchNorm` on several devices in two calls: its processes share statistics once, and normalize by them.

Running it again would have all of them exchange once more. What was shared is a few numbers a channel, so it is kept,
and a recomputation normalizes by it alone, which is a kernel of this process only.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules._functions import SyncBatchNorm

# Autograd does not type its contexts, nor torch its kernels for these norms.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


class _Local(threading.local):
    is_alone = False


_local = _Local()


@contextmanager
def alone() -> Generator[None]:
    """What runs inside exchanges nothing: this process's statistics stand for those of the others.

    For runs of single operations, of which each process does as many as it likes.
    """
    before, _local.is_alone = _local.is_alone, True
    try:
        yield
    finally:
        _local.is_alone = before


def is_alone() -> bool:
    """Whether this thread is inside `alone`."""
    return _local.is_alone


def synchronized_statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, eps: float, momentum: float, group_name: str
) -> Tensor:
    """The statistics of a batch that is spread over the processes of a group, in one tensor.

    These are the mean of each channel, the inverse of its deviation, and of each process that has any elements their
    number in a channel.

    Args:
        x: What lies here, channels in its second dimension.
        running_mean: Written, as the next.
        running_var: Of deviations.
        eps: Added to variances.
        momentum: How much of the running ones is new.
        group_name: By which PyTorch knows the group.
    """
    group = _group(group_name)
    size, num_channels = dist.get_world_size(group), x.size(1)
    if isinstance(x, FakeTensor):
        for running in (running_mean, running_var):
            if running is not None:
                running.zero_()  # a write, as which it is noted
        return x.new_empty(2 * num_channels + size, dtype=torch.promote_types(x.dtype, torch.float32))
    with torch.no_grad():
        x = _dense(x)
        if x.numel():
            mean, deviation = torch.batch_norm_stats(x, eps)
            own = torch.cat([mean, deviation, mean.new_full((1,), x.numel() // num_channels)])
        else:
            own = x.new_zeros(2 * num_channels + 1)
        shared = own.new_empty((size, own.numel()))
        if _local.is_alone:
            shared.copy_(own)
        else:
            dist.all_gather(list(shared), own, group)
        shared = shared[shared[:, -1] >= 1]  # of those that have any elements
        means, deviations, counts = shared.split(num_channels, dim=1)
        flat = counts.view(-1) if running_mean is None else counts.view(-1).to(running_mean.dtype)
        mean, deviation = torch.batch_norm_gather_stats_with_counts(
            x, means, deviations, running_mean, running_var, momentum, eps, flat
        )
        return torch.cat([mean, deviation, counts.view(-1)])


def shares_statistics(part: fx.Node) -> bool:
    """Whether it is a call in which processes share what they keep: an effect that makes something of its own."""
    return part.target is synchronized_statistics


def synchronized_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, eps: float, group_name: str
) -> Tensor:
    """A batch normalized by statistics that are known; in its backward the processes exchange the sums of gradients.

    Args:
        x: What lies here.
        weight: Of each channel.
        bias: Of each channel.
        statistics: What `synchronized_statistics` has returned.
        eps: Added to variances.
        group_name: By which PyTorch knows the group.
    """
    return _Normalized.apply(x, weight, bias, statistics, eps, group_name)


class _Normalized(torch.autograd.Function):
    """The second half of PyTorch's function, with what that saves, and its backward."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Tensor,
        eps: float,
        group_name: str,
    ) -> Tensor:
        x = _dense(x)
        weight = None if weight is None else weight.contiguous()
        num_channels = x.size(1)
        mean, deviation = statistics[: 2 * num_channels].view(2, num_channels)
        counts = statistics[2 * num_channels :, None].to(torch.int32)
        ctx.save_for_backward(x, weight, mean, deviation, counts)
        ctx.process_group = _group(group_name)
        ctx.is_alone = _local.is_alone  # of this thread, which may not be that of the backward
        if isinstance(x, FakeTensor) or not x.numel():
            return torch.empty_like(x)
        return torch.batch_norm_elemt(x, weight, bias, mean, deviation, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(gradient, FakeTensor):
            x, weight = ctx.saved_tensors[:2]
            asked = zip((x, weight, weight), ctx.needs_input_grad, strict=False)
            found = [torch.empty_like(t) if asks else None for t, asks in asked]
        elif ctx.is_alone:
            found = _gradients_alone(ctx, _dense(gradient))
        else:
            found = SyncBatchNorm.backward(ctx, gradient)[:3]
        return *found, None, None, None


def _gradients_alone(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """Those of the batch that lies here, by the kernels that run where there are others."""
    x, weight, mean, deviation, counts = ctx.saved_tensors
    asks = ctx.needs_input_grad[:3]
    kernels: Any = torch
    *sums, of_weight, of_bias = kernels.batch_norm_backward_reduce(gradient, x, mean, deviation, weight, *asks)
    own = kernels.batch_norm_backward_elemt(gradient, x, mean, deviation, weight, *sums, counts) if asks[0] else None
    return [own, of_weight if asks[1] else None, of_bias if asks[2] else None]


def _dense(x: Tensor) -> Tensor:
    """In the order in which the kernels read it."""
    ordered = (torch.channels_last, torch.channels_last_3d)
    return x if any(x.is_contiguous(memory_format=order) for order in ordered) else x.contiguous()


def _group(name: str) -> dist.ProcessGroup:
    return cast(Any, dist).distributed_c10d._resolve_process_group(name)
