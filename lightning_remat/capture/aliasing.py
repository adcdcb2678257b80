"""One run of a captured graph on fake tensors that notes what aliases what, and what each node writes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from ..devices import HOST
from ..errors import TraceError
from ..measure.meter import tensor_storage
from ..module_state.own_draws import draws
from ..module_state.watching import WatchingMode
from ..operations.contexts import entered
from .capture_error import where_of
from .unseen_writes import UNSEEN_WRITES


@dataclass(slots=True)
class Record:
    """What one fx node did.

    Attributes:
        has_tensors: Whether its value holds tensors; a value without is a constant of the step (a shape, a number).
        views: The fx nodes that own the storages in which its value lives, other than itself.
        owns: Whether its value has a storage of its own.
        writes: The fx nodes that own the storages that it wrote in place.
        grafts: Those of them into which it wrote with gradients: they flow through the write from then on.
        is_random: Whether it drew random numbers.
        is_permuted: Whether a tensor in its value has its dimensions in another order in memory.
        needs_grad: Whether gradients flow through it to a tensor in its value.
        differentiates: The fx nodes that it reads and to whose values it returns gradients.
        passes_on: The fx node whose very tensor is its value: a cast to the type that it has.
    """

    has_tensors: bool = False
    views: set[fx.Node] = field(default_factory=set[fx.Node])
    owns: bool = False
    writes: set[fx.Node] = field(default_factory=set[fx.Node])
    grafts: set[fx.Node] = field(default_factory=set[fx.Node])
    is_random: bool = False
    is_permuted: bool = False
    needs_grad: bool = False
    differentiates: set[fx.Node] = field(default_factory=set[fx.Node])
    passes_on: fx.Node | None = None


def record(root: fx.GraphModule, values: list[Any]) -> dict[fx.Node, Record]:
    """Runs the graph once on fake tensors and tells what every node did; nothing is computed, nothing changes.

    Args:
        root: The captured graph.
        values: Of its placeholders: tensors, real or fake, and numbers.

    Raises:
        TraceError: An operation needs values that fake tensors do not have.
    """
    with fake_values(values) as fakes:
        recorder = _Recorder(root)
        try:
            with torch.enable_grad():
                recorder.run(*fakes)
        except TraceError:
            raise
        except Exception as error:
            where, target = where_of(recorder.at), recorder.at.target
            raise TraceError(
                f"{getattr(target, '__name__', target)} asks for the values of tensors to be captured: {error}"
                f"{f' ({where})' if where else ''}. Remedy: keep it outside the forward, or in a submodule of its own",
                where=where,
            ) from error
    return recorder.records


@contextmanager
def fake_values(values: list[Any]) -> Generator[list[Any]]:
    """Fake tensors like the values inside; fake ones are copied within their own mode, so that writes stay inside."""
    known = next((t.fake_mode for t in values if isinstance(t, FakeTensor)), None)
    mode: Any = known or FakeTensorMode(allow_non_fake_inputs=True)
    tensors = {id(value): value for value in values if isinstance(value, Tensor)}
    # TorchDynamo hands over floats that change as such tensors, of which until torch 2.13 fake ones know no value.
    floats = {key: t.item() for key, t in tensors.items() if known is None and t.device == HOST and _is_float(t)}

    def copy(value: Tensor) -> Tensor:
        if value.is_nested:
            raise TraceError(
                f"a nested tensor of {value.size(0)} parts comes in, of which no plan knows how large they are next "
                "time. Remedy: pad it, or rematerialize submodules that get plain tensors"
            )
        if known is None:
            made = mode.from_tensor(value, static_shapes=True)
            if id(value) in floats:
                made.item_memo = floats[id(value)]
            return made
        with torch.no_grad():
            copied = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
        return copied.requires_grad_(value.requires_grad)

    with mode:
        made = {key: copy(t) for key, t in tensors.items()}
        yield [made.get(id(value), value) for value in values]


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float64 and not tensor.is_nested and not tensor.dim()


class WriteWatch(WatchingMode):
    """Notes random operations and writes that no version tells of.

    Of running statistics not even batch norm's schema does; of a list of tensors on fake ones, its schema alone.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.is_random = False
        self.written: list[torch.UntypedStorage | None] = []

    def runs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.is_random |= draws(func, args, kwargs)
        if any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values())):
            raise TraceError(
                f"{func} draws from a generator of its own, whose state a recomputation would not find. Remedy: draw "
                "from the default generator, or leave the submodule out (modules=...)"
            )
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, list) and argument.alias_info is not None and argument.alias_info.is_write:
                self.written += [tensor_storage(t) for t in cast("list[Tensor]", value)]
        if "batch_norm" in func.__name__ and "backward" not in func.__name__ and len(args) > 5 and args[5] is True:
            self.written += [tensor_storage(t) for t in args[3:5] if isinstance(t, Tensor)]
        return func(*args, **kwargs)

    def calls(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuses an operator of which it is not known what its functions, or its kernels, write."""
        raise TraceError(
            f"{func.__name__} runs functions or kernels of its own, of which no plan knows what they write"
        )


class _Recorder(fx.Interpreter):
    """Runs node by node, freeing values after their last use."""

    def __init__(self, root: fx.GraphModule) -> None:
        super().__init__(root)
        self.extra_traceback = False  # in messages of errors
        self.at = next(iter(root.graph.nodes))
        self.records: dict[fx.Node, Record] = {}
        self.owners: dict[int, tuple[torch.UntypedStorage, fx.Node]] = {}  # the storages live, so their numbers hold

    def run_node(self, n: fx.Node) -> Any:
        self.at = n
        inputs = {i: [t for t in tree_leaves(self.env[i]) if isinstance(t, Tensor)] for i in n.all_input_nodes}
        before = {t: t._version for tensors in inputs.values() for t in tensors if not t.is_inference()}
        stored = {t: (tensor_storage(t), self._owner(t)) for tensors in inputs.values() for t in tensors}
        needing = {i for i, tensors in inputs.items() if any(t.requires_grad for t in tensors)}
        watch = WriteWatch()
        with entered(n), watch if n.op.startswith("call") else nullcontext():
            value = super().run_node(n)
            is_recorded = torch.is_grad_enabled() and n.target not in UNSEEN_WRITES
        entry = self.records[n] = Record(is_random=watch.is_random)
        for i, tensors in inputs.items():
            for t in tensors:
                storage, owner = stored[t]
                # Of some writes autograd's versions do not tell.
                is_written = (t in before and t._version != before[t]) or (n.target in UNSEEN_WRITES and i is n.args[0])
                if is_written or (storage is not None and any(w is storage for w in watch.written)):
                    entry.writes.add(owner or i)
                    if is_recorded and t.requires_grad:
                        entry.grafts.add(owner or i)
        if n.op != "output":
            self._note_value(n, entry, [t for t in tree_leaves(value) if isinstance(t, Tensor)])
            origin = next((i for i in inputs if value is self.env[i] and isinstance(value, Tensor)), None)
            entry.passes_on = None if origin is None else self.records[origin].passes_on or origin
        entry.needs_grad &= is_recorded or not entry.writes  # a cast that changes nothing passes gradients on anywhere
        # `y[0] = x` has no value.
        if n.op == "output" or entry.needs_grad or entry.grafts:
            entry.differentiates = needing
        return value

    def _note_value(self, n: fx.Node, entry: Record, tensors: list[Tensor]) -> None:
        entry.has_tensors = bool(tensors)
        entry.is_permuted = any(map(_is_permuted, tensors))
        entry.needs_grad = any(t.requires_grad for t in tensors)
        for t in tensors:
            owner = self._owner(t)
            if owner is None:
                entry.owns = True
                storage = tensor_storage(t)
                if storage is not None:
                    self.owners[storage._cdata] = (storage, n)  # pyright: ignore[reportPrivateUsage]
            elif owner is not n:
                entry.views.add(owner)

    def _owner(self, t: Tensor) -> fx.Node | None:
        storage = tensor_storage(t)
        known = None if storage is None else self.owners.get(storage._cdata)  # pyright: ignore[reportPrivateUsage]
        return None if known is None else known[1]


def _is_permuted(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    strides = [stride for stride, size in zip(tensor.stride(), tensor.size(), strict=True) if size > 1]
    return any(outer < inner for outer, inner in pairwise(strides))
