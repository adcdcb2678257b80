"""Which parts of a module or step can be captured where the whole cannot: the outermost submodules that trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..capture.compiled_by_users import has_compiled_methods, is_compiled
from ..capture.dynamo import CapturedGraph
from ..errors import MismatchError, TraceError
from ..execution.assembly import checked_program
from ..execution.program import Program
from ..module_state.nesting import flatten
from ..module_state.refusals import is_sharded, reason_against
from ..module_state.sharding import is_layer
from ..operations.operation import TracedModule
from ..plans.plan import Plan
from ..schedules.graph import Graph
from .calls import Call, View
from .look_through import NoCallError, at_first_size

_ARRAYS: tuple[Any, ...] = (Tensor, np.ndarray)
"""What calls of one kind may have other values of."""

_NOTHING_TO_PLAN = (
    " it calls none but single layers, which are not rematerialized by themselves, and what saves nothing. Remedy: put "
    "layers into blocks, modules with a forward of their own"
)


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """The parts of a module, or of a training step, that can be rematerialized one by one.

    Attributes:
        view: Their calls in the order of a step (a submodule that is called twice appears twice), and what lies
            between.
        traced: Submodule name → its operations.
        reasons: Why each part that is not among them, though it contains some or is left as it is, was not captured;
            why which parts of those among them are run as one operation.
        left: The graphs that were captured and are not among them.
    """

    view: View
    traced: dict[str, TracedModule]
    reasons: tuple[str, ...]
    left: frozenset[CapturedGraph] = frozenset()

    @property
    def tried(self) -> str:
        """The reasons as lines of an error."""
        return "".join(f"\n  {reason}" for reason in self.reasons) or _NOTHING_TO_PLAN

    def profiled(self, **options: Any) -> dict[str, Graph]:
        """Region → its profile on the values of its first call, with the options of `profile`."""
        graphs: dict[str, Graph] = {}
        for call in self.view.calls:
            if call.name not in graphs:
                graphs[call.name] = call.profiled(self.traced[call.name], **options)
        return graphs


def find_regions(look: Callable[[Sequence[Any] | None], View], watched: Sequence[Any] | None) -> Regions:
    """The outermost submodules that can be captured as a step calls them, or the graphs that their forwards consist of.

    Of a submodule that can be captured neither way its own submodules are tried, and what it does besides stays plain.
    The step is run once for each level; it holds the arguments of the calls, as the planned step will too.

    Args:
        look: Looks through a step for the calls of some submodules, or of those that it calls outermost (None).
        watched: What to begin with.

    Returns:
        None of them where there is none, with the reasons.

    Raises:
        NoCallError: The step calls nothing to begin with.
    """
    traced: dict[str, TracedModule] = {}
    known: dict[Hashable, TracedModule] = {}
    reasons: dict[str, str] = {}
    divided: dict[nn.Module, str] = {}
    kinds: dict[str, Any] = {}
    while watched is None or watched:
        try:
            view = look(watched)
        except NoCallError:
            if watched is None:
                raise
            # A container is not called itself where a loop calls what it holds.
            without = [*divided, *(m for m in watched if isinstance(m, nn.Module))]
            watched, divided = _outermost(inner for m in without for inner in _parts_within(m)), {}
            continue
        called = {call.module for call in view.calls}
        if any(call.within & called for call in view.calls):
            watched = _apart(view.calls, called)
            continue
        idle_parts = [m for m in watched or () if isinstance(m, nn.Module) and m not in called]
        if inner := _outermost(part for m in idle_parts for part in _parts_within(m)):
            watched = [*(call.name for call in view.calls), *inner]
            continue
        for name in dict.fromkeys(call.name for call in view.calls):
            own = [call for call in view.calls if call.name == name]
            if name in traced and not _serves(traced[name], kinds[name], own):
                del traced[name]
            if name not in traced and name not in reasons:
                _note(name, own, traced, known, reasons)
                kinds[name] = _kind_of_call(own[0])
        failed = dict.fromkeys(c.module for c in view.calls if c.name not in traced and not c.is_divided)
        calls = [call for call in view.calls if call.name in traced]
        idle = [m for m in divided if not any(c.module is m and c.trains for c in calls)]
        if idle and not failed:  # of a wrapper, only what goes on around the network was captured
            rest = [call.name for call in calls if call.module not in idle]
            watched = [*rest, *_outermost(inner for m in idle for inner in _parts_within(m))]
            divided = {m: name for m, name in divided.items() if m not in idle}
            continue
        if not failed:
            calls = [call for call in calls if traced[call.name].operations]  # what hands on its input is none
            found = {call.name: traced[call.name] for call in calls}
            inside = [f"{name}.{reason}".lstrip(".") for name, part in found.items() for reason in part.reasons]
            parts = [call.part for call in view.calls if call.name not in found and call.part is not None]
            left = frozenset(part.graph for part in parts if part.graph is not None)
            return Regions(replace(view, calls=calls), found, (*reasons.values(), *inside), left)
        named = {call.module: call.name for call in view.calls}
        gathered = {call.module for call in view.calls if call.part is not None}
        watched = [call.name for call in calls]
        for m in failed:
            if reason_against(m, is_gathered=m in gathered) is None and not is_exchanged(m):
                divided[m] = named[m]
                watched.append(f"{named[m]}[]")
            else:
                watched += list(_parts_within(m))
    return Regions(View([], 0), {}, tuple(reasons.values()))


def profiled_out_of_place(
    calls: Iterable[Call], known: Mapping[str, TracedModule], **options: Any
) -> dict[str, tuple[TracedModule, Graph]]:
    """The regions that overwrite in activations, with these as operations of their own: name → operations, profile.

    Args:
        calls: The values of the first call of each region serve.
        known: Region → its operations in place.
        **options: Of `profile`.
    """
    found: dict[str, tuple[TracedModule, Graph]] = {}
    for call in {call.name: call for call in reversed(list(calls))}.values():
        try:
            apart = call.out_of_place(known[call.name] if call.name in known else call.traced())
        except TraceError:  # it stays as it is either way; `find_regions` has told why
            continue
        if apart is not None:
            found[call.name] = apart, call.profiled(apart, **options)
    return found


def programs_of(calls: Iterable[Call], plans: Mapping[str, Plan]) -> dict[str, Program]:
    """Region → its program, of plans that were made earlier; none of a size at which the step does not call it.

    Raises:
        MismatchError: A plan is for something else than what the step does, or for what cannot be captured any more.
    """
    first = {call.name: call for call in reversed(list(calls))}
    missing = [name for name in plans if at_first_size(name) not in first]
    if missing:
        raise MismatchError(f"the plan is for {missing}, which the step does not call: it calls {list(first)}")
    known: dict[Hashable, TracedModule] = {}
    programs: dict[str, Program] = {}
    for name, plan in plans.items():
        if name not in first:
            continue
        try:
            programs[name] = checked_program(first[name].ways(known), plan)
        except TraceError as error:
            raise MismatchError(f"the plan is for what is not captured any more: {error}") from error
    return programs


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """The submodules right below that have a forward, those in containers included.

    A layer of PyTorch's without submodules is left out: it is one operation, whose input the code around it holds.
    """
    for name, child in module.named_children():
        if name == "parametrizations" or is_layer(child):
            continue
        if type(child).forward is nn.Module.forward:
            yield from parts_of(child)
        else:
            yield child


def _parts_within(module: nn.Module) -> Iterator[nn.Module]:
    return iter(()) if is_sharded(module) or is_compiled(module) else parts_of(module)


def _serves(traced: TracedModule, kind: Any, calls: Sequence[Call]) -> bool:
    """Whether what an earlier look captured is what runs in this one, which may see more calls."""
    if (part := calls[0].part) is not None:
        return part.graph is traced.captured
    return all(_kind_of_call(call) == kind for call in calls)


def _note(
    name: str,
    own: Sequence[Call],
    traced: dict[str, TracedModule],
    known: dict[Hashable, TracedModule],
    reasons: dict[str, str],
) -> None:
    """Notes the operations of a region, all calls of which must be alike, or why it has none."""
    try:
        part = own[0].part
        if part is None or part.is_whole:
            if any(_kind_of_call(a) != _kind_of_call(b) for a, b in pairwise(own)):
                raise TraceError(f"it is called {len(own)} times in a step, with arguments of different kinds")
            if (reason := reason_against(own[0].module, is_gathered=part is not None)) is not None:
                raise TraceError(reason)
            if is_exchanged(own[0].module):
                raise TraceError("its forward has been replaced on this instance, or a part of it is compiled")
        traced[name] = own[0].traced(known)
    except TraceError as error:
        reasons[name] = f"{name}: {error}" if name else str(error)


def is_exchanged(module: nn.Module) -> bool:
    """Whether the module does something else than its class says, or is compiled in part: that stays as it is.

    So does what holds a bounded deque, of which TorchDynamo would lose track: a full one keeps its oldest items there.
    """

    def is_special(m: Any) -> bool:
        if is_compiled(m) or has_compiled_methods(m):
            return True
        return any(isinstance(v, deque) and v.maxlen is not None for v in vars(m).values())  # pyright: ignore

    return "forward" in vars(module) or any(map(is_special, module.modules()))


def _kind_of_call(call: Call) -> tuple[Any, list[Any]]:
    leaves, structure = flatten((call.args, call.kwargs))
    return structure, [leaf if not isinstance(leaf, _ARRAYS) else type(leaf) for leaf in leaves]


def _apart(calls: Sequence[Call], called: Set[nn.Module]) -> list[Any]:
    """What to watch where a step calls modules by themselves that it also calls within others.

    These others are served part by part. A layer stays plain where it is called by itself, as it does among parts.
    """
    inner = {m for call in calls for m in call.within & called}
    layers = {m for m in inner if is_layer(m)}
    outer = dict.fromkeys(call.module for call in calls if call.within & (inner - layers))
    others = (call.name for call in calls if call.module not in outer and call.module not in layers)
    return [*others, *(part for m in outer for part in _parts_within(m))]


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that lie inside no other of them."""
    found = list(dict.fromkeys(modules))
    inside = {inner for m in found for inner in m.modules() if inner is not m}
    return [m for m in found if m not in inside]
