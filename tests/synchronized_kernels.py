"""The kernels of `nn.SyncBatchNorm`, which PyTorch has for devices alone, for the CPU, and a norm that takes them."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm

_library = torch.library.Library("aten", "IMPL")


class HostSyncBatchNorm(nn.BatchNorm2d):
    """What `nn.SyncBatchNorm` does in training, for which neither it nor DDP would take the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        numbers = self.eps, self.momentum, dist.group.WORLD, dist.get_world_size()
        output = SyncBatchNorm.apply(input, self.weight, self.bias, self.running_mean, self.running_var, *numbers)
        return cast(Tensor, output)


def _dims(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _along(channels: Tensor, x: Tensor) -> Tensor:
    return channels.view(-1, *[1] * (x.dim() - 2))


def _statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.mean(_dims(x)), (x.var(_dims(x), unbiased=False) + eps).rsqrt()


def _gathered(
    x: Tensor,
    means: Tensor,
    deviations: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    number = counts.sum()
    mean = (means * counts[:, None]).sum(0) / number
    var = ((deviations.pow(-2) - eps + (means - mean).square()) * counts[:, None]).sum(0) / number
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * number / (number - 1), momentum)
    return mean, (var + eps).rsqrt()


def _normalized(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, deviation: Tensor, eps: float) -> Tensor:
    return (x - _along(mean, x)) * _along(deviation, x) * _along(weight, x) + _along(bias, x)


def _sums(
    gradient: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, *asks: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, product = gradient.sum(_dims(x)), (gradient * (x - _along(mean, x))).sum(_dims(x))
    return total, product, product * deviation, total.clone()


def _gradient(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    deviation: Tensor,
    weight: Tensor,
    total: Tensor,
    product: Tensor,
    counts: Tensor,
) -> Tensor:
    number = counts.sum()
    slope = (x - _along(mean, x)) * _along(deviation.square() * product / number, x)
    return (gradient - _along(total / number, x) - slope) * _along(deviation * weight, x)


for name, kernel in {
    "batch_norm_stats": _statistics,
    "batch_norm_gather_stats_with_counts": _gathered,
    "batch_norm_elemt": _normalized,
    "batch_norm_backward_reduce": _sums,
    "batch_norm_backward_elemt": _gradient,
}.items():
    _library.impl(name, kernel, "CPU")
