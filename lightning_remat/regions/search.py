"""Which parts of a module or step can be captured where the whole cannot: the outermost submodules that trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from ..capture.tracer import TracedModule, trace, trace_out_of_place
from ..errors import TraceError
from ..module_state.nesting import flatten
from ..module_state.refusals import is_sharded, reason_against
from ..profiling.profiler import profile
from ..schedules.graph import Graph
from .calls import Call, NoCallError, View


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """The parts of a module, or of a training step, that can be rematerialized one by one.

    Attributes:
        view: Their calls in the order of a step (a submodule that is called twice appears twice), and what lies
            between.
        traced: Submodule name → its operations.
        reasons: Why each part that is not among them, though it contains some or is left as it is, was not captured;
            why which parts of those among them are run as one operation.
    """

    view: View
    traced: dict[str, TracedModule]
    reasons: tuple[str, ...]

    @property
    def tried(self) -> str:
        """The reasons as lines of an error."""
        return "".join(f"\n  {reason}" for reason in self.reasons) or " it calls none that save anything"

    def profiled(self, **options: Any) -> dict[str, Graph]:
        """Submodule name → its profile on the arguments of its first call, with the options of `profile`."""
        graphs: dict[str, Graph] = {}
        for call in self.view.calls:
            if call.name not in graphs:
                with call.ambient.restored():
                    graphs[call.name] = profile(self.traced[call.name], *call.args, **options, **call.kwargs)
        return graphs


def find_regions(look: Callable[[Sequence[Any] | None], View], watched: Sequence[nn.Module] | None) -> Regions:
    """The outermost submodules that can be traced as a step calls them.

    A submodule that cannot is looked into: its own submodules are tried, and what it does besides stays plain. The
    step is run once for each level; it holds the arguments of the calls, as the planned step will too.

    Args:
        look: Looks through a step for the calls of some submodules, or of those that it calls outermost (None).
        watched: What to begin with.

    Returns:
        None of them where there is none, with the reasons.

    Raises:
        NoCallError: The step calls nothing to begin with.
    """
    traced: dict[nn.Module, TracedModule] = {}
    reasons: dict[nn.Module, str] = {}
    while watched is None or watched:
        try:
            view = look(watched)
        except NoCallError:
            if watched is None:
                raise
            break
        called = dict.fromkeys(call.module for call in view.calls)
        failed = [m for m in called if m not in traced and not _is_traced(m, view.calls, traced, reasons)]
        if not failed:
            found = {call.name: traced[call.module] for call in view.calls}
            inside = [f"{name}.{reason}".lstrip(".") for name, part in found.items() for reason in part.reasons]
            return Regions(view, found, (*reasons.values(), *inside))
        watched = _outermost(inner for m in called for inner in ([m] if m in traced else _parts_within(m)))
    return Regions(View([], 0), {}, tuple(reasons.values()))


def profiled_out_of_place(calls: Iterable[Call], **options: Any) -> tuple[dict[str, TracedModule], dict[str, Graph]]:
    """The submodules that overwrite in activations, with these as operations of their own: name → operations, profile.

    Args:
        calls: The arguments of the first call of each submodule serve.
        **options: Of `profile`.
    """
    traced: dict[str, TracedModule] = {}
    graphs: dict[str, Graph] = {}
    for call in {call.name: call for call in reversed(list(calls))}.values():
        with call.ambient.restored():
            apart = trace_out_of_place(call.module, *call.args, **call.kwargs)
            if apart is not None:
                traced[call.name], graphs[call.name] = apart, profile(apart, *call.args, **options, **call.kwargs)
    return traced, graphs


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """The submodules right below that have a forward, those in containers included.

    A layer of PyTorch's without submodules is left out: it is one operation, whose input the code around it holds.
    """
    for name, child in module.named_children():
        is_layer = type(child).__module__.startswith("torch.nn.") and not any(child.children())
        if name == "parametrizations" or is_layer:
            continue
        if type(child).forward is nn.Module.forward:
            yield from parts_of(child)
        else:
            yield child


def _parts_within(module: nn.Module) -> Iterator[nn.Module]:
    return iter(()) if is_sharded(module) else parts_of(module)


def traced_call(call: Call) -> TracedModule:
    """The operations of a call."""
    with call.ambient.restored():
        return trace(call.module, *call.args, **call.kwargs)


def _is_traced(
    module: nn.Module, calls: Sequence[Call], traced: dict[nn.Module, TracedModule], reasons: dict[nn.Module, str]
) -> bool:
    """Notes the operations of a submodule, all calls of which must be alike, or why it has none."""
    own = [call for call in calls if call.module is module]
    try:
        if any(_kind_of_call(a) != _kind_of_call(b) for a, b in pairwise(own)):
            raise TraceError(f"it is called {len(own)} times in a step, with arguments of different kinds")
        if (reason := reason_against(module)) is not None:
            raise TraceError(reason)
        traced[module] = traced_call(own[0])
    except TraceError as error:
        reasons[module] = f"{own[0].name}: {error}" if own[0].name else str(error)
    return module in traced


def _kind_of_call(call: Call) -> tuple[Any, list[Any]]:
    leaves, structure = flatten((call.args, call.kwargs))
    return structure, [type(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that lie inside no other of them."""
    found = list(dict.fromkeys(modules))
    inside = {inner for m in found for inner in m.modules() if inner is not m}
    return [m for m in found if m not in inside]
