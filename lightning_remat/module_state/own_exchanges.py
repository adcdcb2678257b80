"""Steps that a process tries by itself exchange nothing: others may try fewer, or none, and would wait or take part."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .agreement import is_shared
from .nesting import tensors_in
from .watching import WatchingMode

# Of c10d only its Python half is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

EXCHANGING = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
"""Namespaces of operations that exchange between the processes of a group."""

_numbers = itertools.count(1)
"""By which PyTorch tells apart the groups of several threads, and of one that tries within another."""


@contextmanager
def exchanging_alone(module: nn.Module) -> Generator[None]:
    """What runs inside exchanges with no other process, and must be undone.

    Each stands for all of a group: what is summed is its own alone, what is gathered its own, several times. Those that
    hold parts of the module are still asked for them: they run the same steps.
    """
    if not (dist.is_available() and dist.is_initialized()) or is_shared(module):
        yield
        return
    with _Alone():
        yield


class _Alone(WatchingMode):
    """Hands operations that exchange a group of the same size which PyTorch has for tests, and which does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[str, Any] = {}  # by the names of those that they stand for
        self._names: dict[str, str] = {}  # of those whose operations ask for their group by its name

    def __exit__(self, *error: Any) -> None:
        """As before."""
        super().__exit__(*error)
        for name in self._names.values():
            _c10d()._unregister_process_group(name)

    def runs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation; one that exchanges does so in a group of its own."""
        named = dict(kwargs)
        if func.namespace not in EXCHANGING:
            return func(*args, **named)
        if func is torch.ops.c10d.allreduce_.default:
            return args[0], _ended(args[0])
        given = list(args)
        for at, argument in enumerate(func._schema.arguments):
            if argument.name in {"process_group", "group_name"}:
                holder, key = (given, at) if at < len(given) else (named, argument.name)
                cast(Any, holder)[key] = self._stand_in(cast(Any, holder)[key])
            elif at < len(given) and (argument.name.startswith("output") or func.__name__.startswith("recv")):
                for tensor in tensors_in(given[at]):  # two steps are to find the same there where nothing is sent
                    tensor.detach().zero_()
        return func(*given, **named)

    def _stand_in(self, group: Any) -> Any:
        if not isinstance(group, str):
            return self._group(_c10d().ProcessGroup.unbox(group)).boxed()
        if group not in self._names:
            name = f"alone {next(_numbers)}"
            _c10d()._register_process_group(name, self._group(_c10d()._resolve_process_group(group)))
            self._names[group] = name
        return self._names[group]

    def _group(self, group: Any) -> Any:
        if group.group_name not in self._groups:
            rank, size, kind = group.rank(), group.size(), _c10d().ProcessGroup.BackendType.CUSTOM
            made = self._groups[group.group_name] = _c10d().ProcessGroup(_c10d().HashStore(), rank, size)
            backend = _c10d().FakeProcessGroup._create_internal(rank, size)
            for device in group._device_types:
                made._register_backend(device, kind, backend)
            made._set_default_backend(kind)
        return self._groups[group.group_name]


def _ended(tensors: Sequence[Tensor]) -> Any:
    """The work of a sum of what is here: DDP, and hooks of its communication, read that from it."""
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    return _c10d()._create_work_from_future(future).boxed()


def _c10d() -> Any:
    return cast(Any, torch)._C._distributed_c10d
