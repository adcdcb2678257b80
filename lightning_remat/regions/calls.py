"""Calls of one training step that rematerialization can serve, and what lies between them."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..capture.capture_error import CaptureError
from ..capture.dynamo import CapturedGraph
from ..capture.forwards import forward_of
from ..capture.tracer import not_one_graph, out_of_place, trace, traced_graph
from ..measure.meter import tensor_storage
from ..measure.tensor_bytes import storage_bytes
from ..module_state.ambient import Ambient
from ..module_state.batches import tensors_held
from ..module_state.nesting import flatten
from ..module_state.sharding import stand_ins
from ..operations.operation import TracedModule
from ..plans.step_memory import turns_of
from ..profiling.profiler import profile_arguments, profile_call
from ..schedules.graph import Graph
from .phases import Span, order_of
from .profiles import kind_of, known_profile
from .saved_between import Staying


class Returned(NamedTuple):
    """A tensor that a call returned.

    Attributes:
        storage: Its storage, dead once nobody holds it.
        num_bytes: Of that.
        gradient_bytes: Of its gradient; 0 where it has none.
    """

    storage: weakref.ref[torch.UntypedStorage]
    num_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """One outermost call of a submodule during a training step.

    Attributes:
        name: The submodule's name in the root module; empty for the root itself.
        module: The submodule.
        args: Positional arguments; tensors are detached and keep `requires_grad`.
        kwargs: Keyword arguments, likewise.
        ambient: The settings (autocast) under which it was called.
        outputs: What it returned.
        part: What was captured while the step ran: one of the graphs of the submodule's forward, where it is no single
            graph (`args` are then the tensors that come into it), or the single graph of a sharded one.
        tick: When it began, in the order of all that the step was seen to do.
        span: Between which backwards of the step it began, and waits for its own.
        within: The modules that it calls, of those that were watched.
        is_over: Whether no backward comes to it, as its outputs are detached: what it saves dies with them.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ambient: Ambient
    outputs: tuple[Returned, ...]
    part: Part | None = None
    tick: int = 0
    span: Span = field(default_factory=Span)
    within: frozenset[nn.Module] = frozenset()
    is_over: bool = False

    @property
    def is_divided(self) -> bool:
        """Whether this is one of several graphs of a forward."""
        return self.part is not None and not self.part.is_whole

    @property
    def trains(self) -> bool:
        """Whether it has parameters to train, or of a frozen module any: a graph may hold what goes on around them."""
        is_frozen = not any(p.requires_grad for p in self.module.parameters())
        values: Iterable[Any] = self.module.parameters()
        if self.part is not None and not self.part.is_whole:
            values = self.part.values
        return any(isinstance(v, nn.Parameter) and (v.requires_grad or is_frozen) for v in values)

    def traced(self, known: dict[Hashable, TracedModule] | None = None) -> TracedModule:
        """The operations of the call.

        Args:
            known: Those of other calls, to which these are added: modules of equal structure share a graph, and with it
                its operations.

        Raises:
            TraceError: It has none.
        """
        with self.ambient.restored():
            if self.part is None:
                return trace(self.module, *self.args, **self.kwargs)
            known = {} if known is None else known
            key = (self.part.graph, self.ambient, tuple(map(kind_of, self.part.values)))
            if key not in known:
                traced = self._traced_part(is_out_of_place=False)
                assert traced is not None
                known[key] = traced
            return replace(known[key], module=self.module)

    def out_of_place(self, traced: TracedModule) -> TracedModule | None:
        """Its operations with in-place activations apart; None if there are none."""
        with self.ambient.restored():
            if self.part is None:
                return out_of_place(traced, self.args, self.kwargs)
            return self._traced_part(is_out_of_place=True)

    def ways(self, known: dict[Hashable, TracedModule]) -> Iterator[TracedModule]:
        """The ways in which its operations may run, as of `ways_of`; for what is known see `traced`."""
        yield (traced := self.traced(known))
        if (apart := self.out_of_place(traced)) is not None:
            yield apart

    def profiled(self, traced: TracedModule, **options: Any) -> Graph:
        """The costs of these operations in the call, with the options of `profile`."""
        part, leaves = self.part, flatten((self.args, self.kwargs))[0]

        def made() -> Graph:
            if part is None:
                return profile_arguments(traced, self.args, self.kwargs, **options)
            return profile_call(traced, stand_ins(part.values), tensors_held((self.args, self.kwargs)), **options)

        with self.ambient.restored():
            graph = known_profile(traced, leaves if part is None else part.values, options, made)
        # Of this module: others that share the graph may be sharded over fewer processes, or more.
        own_bytes = storage_bytes([*self.module.parameters(), *self.module.buffers()])
        return replace(graph, static_bytes=own_bytes).asked_for(self.span.gradients)

    def _traced_part(self, *, is_out_of_place: bool) -> TracedModule | None:
        part = self.part
        assert part is not None
        if part.graph is None:
            assert part.failure is not None
            raise not_one_graph(self.module, part.failure) from part.failure
        forward = forward_of(self.module, is_whole=part.is_whole)
        given, values = tensors_held((self.args, self.kwargs)), stand_ins(part.values)
        with torch.enable_grad():
            return traced_graph(self.module, forward, part.graph, values, given, is_out_of_place=is_out_of_place)


@dataclass(frozen=True, slots=True)
class Part:
    """A graph within a forward, and the values with which it runs.

    Attributes:
        graph: What TorchDynamo captured.
        values: Of its placeholders; those that come from elsewhere in the step are detached. Parameters that are
            gathered for the forward alone are empty afterwards.
        is_whole: Whether it is all of the forward: of a module that can be captured only while it runs.
        failure: Why that was not possible.
    """

    graph: CapturedGraph | None
    values: list[Any]
    is_whole: bool = False
    failure: CaptureError | None = None

    @classmethod
    def of_whole(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Part:
        """That of a forward which is about to run, whose parameters are there only now."""
        try:
            return cls(*forward_of(module).bind(module, args, kwargs), is_whole=True)
        except CaptureError as error:
            return cls(None, [], is_whole=True, failure=error)


@dataclass(frozen=True, slots=True)
class Moment:
    """The forward of a unit under `fully_shard` begins or ends.

    Attributes:
        unit: The module.
        tick: When, as of calls.
        begins: Which of both.
        has_gradient: Whether a tensor that comes into it has a gradient.
    """

    unit: nn.Module
    tick: int
    begins: bool
    has_gradient: bool


@dataclass(frozen=True, slots=True)
class View:
    """What a step was seen to do when it was looked through.

    Attributes:
        calls: The chosen calls, in order.
        saved_bytes: What the code outside these calls saves for its backward, what the calls hold or return apart.
        staying: What the step saves and returns.
        moments: Of the units under `fully_shard`, in order.
        differentiates: Whether the step asked for derivatives of its own.
        is_outdated: Whether graphs that were captured meanwhile would have served calls before, too, so that the next
            step runs others.
    """

    calls: list[Call]
    saved_bytes: int
    staying: Staying = field(default_factory=Staying)
    moments: tuple[Moment, ...] = ()
    differentiates: bool = False
    is_outdated: bool = False

    @property
    def over(self) -> tuple[int, ...]:
        """The numbers of the calls to which no backward comes, as of `Surroundings.over`."""
        over = () if self.moments else tuple(k for k, call in enumerate(self.calls) if call.is_over)
        return over if len(over) < len(self.calls) else ()  # of a step that hands out nothing no more is known

    @property
    def order(self) -> tuple[int, ...]:
        """In which the calls run forward and backward, as `Surroundings.order` tells it."""
        order = () if self.moments else order_of([call.span for call in self.calls])
        if not (over := self.over):
            return order
        turns = [turn for turn in turns_of(order, len(self.calls)) if ~turn not in over]
        for k in reversed(over):
            # What it holds dies with what it returned, or with what others have made of that, as the next may have.
            readers = self._readers(k) or [k + 1 if k + 1 in over else k]
            ends = [turns.index(~reader if reader in over and reader > k else reader) for reader in readers]
            turns.insert(max(ends) + 1, ~k)
        return tuple(turns)

    def _readers(self, k: int) -> list[int]:
        """The calls into which something comes that call `k` returned."""
        returned = {id(made.storage) for made in self.calls[k].outputs}  # of a storage there is one weak reference

        def reads(call: Call) -> bool:
            storages = map(tensor_storage, tensors_held((call.args, call.kwargs)))
            return any(id(weakref.ref(storage)) in returned for storage in storages if storage is not None)

        return [reader for reader in range(k + 1, len(self.calls)) if reads(self.calls[reader])]
