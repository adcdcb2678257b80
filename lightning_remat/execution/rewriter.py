"""Swaps a module's forward for the executor, in place, and back."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ..capture.capture_error import CaptureError
from ..capture.dynamo import CapturedGraph, CompiledForward
from ..capture.forwards import forward_of
from ..capture.hook_guards import hooks_of_all_modules
from ..capture.shared_setting import captures_here
from ..module_state.nesting import extents_of
from ..module_state.refusals import in_the_way, is_captured, is_in_checkpoint
from ..module_state.sharding import gathering_units, planned_resharding, restore_resharding, set_reshards
from ..plans.plan import Plan
from ..schedules.schedule import Schedule
from .bound import STATE, bind, called, unbind
from .compiling import StretchCompiler
from .executor import Watch
from .forward import run_forward
from .later_graphs import Call, LaterGraphs, Part, is_worth
from .modified import suspect
from .program import Program

_MOST_BREAKS = 2
"""Calls in a row in which what was one graph breaks, before it is captured in pieces at once: trying takes time."""


class _Rewritten:
    """What `install` leaves on a module: shared by its deep copies, gone from its pickle.

    Args:
        plan: That of the module.
        parts: The programs of the graphs that its forward consists of, and their plans; none where only its submodules
            have programs of their own.
        planner: What makes further plans, for graphs that TorchDynamo captures later.
        left: Graphs that were captured before and stay as they are.
        headroom_bytes: What the step by these plans leaves of its budget.

    Attributes:
        serves_eval: Whether it is planned in eval mode, as a part of something in training may be, and for that.
        is_in_step: Whether a training step calls it, whose compiled functions stay as they are with all they call.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Sequence[Part] = (),
        planner: str | Callable[..., Schedule] = "auto",
        left: Iterable[CapturedGraph] = (),
        headroom_bytes: int = 0,
    ) -> None:
        self.serves_eval = self.is_in_step = False
        self.plan, self.parts, self.later = plan, parts, LaterGraphs(parts, planner, headroom_bytes)
        self.original = type(parts[0][0].traced.module).forward if parts else None
        self._forward: CompiledForward | None = parts[0][0].traced.forward if parts else None
        self._num_breaks = 0
        self.watch, self.ran = cast("Watch | None", None), set[Program]()
        self._compiler: StretchCompiler | None = None
        self._lock = threading.RLock()  # what profiles one graph may run another one
        # Of each graph by the extents of what comes in: one that runs at several sizes has a plan for each.
        self.programs: dict[CapturedGraph, dict[tuple[int, ...], Program | None]] = {}
        for program, part in parts:
            sizes = self.programs.setdefault(cast(CapturedGraph, program.traced.captured), {})
            sizes[program.traced.extents] = program if is_worth(part) or len(parts) == 1 else None
        for graph in left:
            self.programs.setdefault(graph, {(): None})

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's results, by the programs of the graphs that TorchDynamo's guards choose.

        Where a forward that was one graph breaks now, what can be captured of it is planned piece by piece; where it
        does so again and again it is not tried as one graph any more.

        Raises:
            CaptureError: It is not captured any more, and nothing has run.
        """
        forward = cast(CompiledForward, self._forward)
        try:
            found = self._call(forward, module, args, kwargs)
            self._num_breaks = 0
            return found
        except CaptureError as error:
            is_break = forward.is_whole and error.where is not None and not hooks_of_all_modules()
            if error.is_final or not is_break:  # between graphs hooks of all modules would run with what they hook
                raise
            warnings.warn(
                f"{type(module).__name__} runs without rematerialization where it breaks now: {error} ({error.where}); "
                "what can be captured is planned piece by piece, and the step may need more than its budget. Remedy: "
                "call rematerialize again in such a step",
                stacklevel=4,
            )
        divided = forward_of(module, is_whole=False)
        self._num_breaks += 1
        if self._num_breaks == _MOST_BREAKS:
            self._forward = divided
        return self._call(divided, module, args, kwargs)

    def _call(self, forward: CompiledForward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward.call(partial(self._run, Call(forward, module, args, kwargs)), module, args, kwargs)

    def _run(self, call: Call, graph: CapturedGraph, values: list[Any]) -> Any:
        if graph not in self.later.parameters:
            self.later.note(call.module, graph, values)
        if graph not in self.programs or self.later.is_outgrown(call, graph, values):
            with self._lock:
                if graph not in self.programs or self.later.is_outgrown(call, graph, values):
                    found = self._finished(self.later.program_for(call, graph, values))
                    if found is not None or graph not in self.programs:
                        self.programs[graph] = {(): found}
                    if found is not None:
                        suspect(found)
        self.later.runs(call, graph)
        program = _closest(self.programs[graph], values)
        if program is None:
            return graph.run(values)
        self.ran.add(program)
        return run_forward(program, values, self.watch)

    def compile(self, compiler: StretchCompiler) -> None:
        """See `compile_programs`."""
        self._compiler = compiler
        self.programs = {
            graph: {extents: self._finished(program) for extents, program in sizes.items()}
            for graph, sizes in self.programs.items()
        }

    def _finished(self, program: Program | None) -> Program | None:
        return program if program is None or self._compiler is None else self._compiler.compiled(program)

    def __deepcopy__(self, memo: Any) -> _Rewritten:
        return self


def _closest(programs: Mapping[tuple[int, ...], Program | None], values: list[Any]) -> Program | None:
    """Of the programs of a graph, by the extents of the values that they are for, that for the most similar ones."""
    if len(programs) == 1:
        return next(iter(programs.values()))
    own = extents_of(values)
    return programs[min(programs, key=lambda planned: sum(abs(a - b) for a, b in zip(planned, own, strict=True)))]


def install(module: nn.Module, program: Program, plan: Plan, planner: str | Callable[..., Schedule] = "auto") -> None:
    """Puts the program in the place of the module's forward; one that changes nothing leaves it."""
    restore(module)
    if is_worth(plan):
        forced(module, program, plan, planner)


def forced(module: nn.Module, program: Program, plan: Plan, planner: str | Callable[..., Schedule] = "auto") -> None:
    """Puts the program in the place of the module's forward even if it recomputes nothing, to measure its cost."""
    headroom = max(0, plan.budget_bytes - plan.peak_bytes)
    _put(module, _Rewritten(plan, [(program, plan)], planner, headroom_bytes=headroom))


def _put(module: nn.Module, state: _Rewritten) -> None:
    vars(module)[STATE] = state
    if state.parts:
        bind(module, forward)


def install_parts(
    programs: Mapping[str, Program],
    plans: Mapping[str, Plan],
    planner: str | Callable[..., Schedule] = "auto",
    left: Iterable[CapturedGraph] = (),
    headroom_bytes: int = 0,
    *,
    trains: bool = True,
    is_in_step: bool = False,
) -> list[nn.Module]:
    """Puts programs in the place of the forwards, or of the graphs within forwards, that they were made for.

    Args:
        programs: Region → its program.
        plans: Region → its plan.
        planner: Makes further plans, for graphs that are captured later.
        left: Graphs that stay as they are, as their programs would not be worth it or there are none.
        headroom_bytes: What the step by these plans leaves of its budget.
        trains: Whether what consists of them is in training, so that those in eval mode are meant to be.
        is_in_step: Whether that is a training step, whose compiled functions stay as they are.

    Returns:
        The modules that are rewritten.
    """
    parts: dict[nn.Module, list[Part]] = {}
    for name, program in programs.items():
        parts.setdefault(program.traced.module, []).append((program, plans[name]))
    rewritten = {m: own for m, own in parts.items() if any(is_worth(plan) for _, plan in own)}
    for m, own in rewritten.items():
        restore(m)
        state = _Rewritten(own[0][1], own, planner, left, headroom_bytes)
        state.serves_eval, state.is_in_step = trains and not m.training, is_in_step
        _put(m, state)
    return list(rewritten)


def install_regions(
    module: nn.Module,
    programs: Mapping[str, Program],
    plan: Plan,
    planner: str | Callable[..., Schedule] = "auto",
    left: Iterable[CapturedGraph] = (),
) -> None:
    """Puts the programs of its regions in a module.

    Args:
        module: What consists of the regions.
        programs: Region → its program.
        plan: The plan of the whole, which holds those of the regions.
        planner: Makes further plans, for graphs that are captured later.
        left: See `install_parts`.
    """
    assert plan.step is not None
    restore(module)
    install_parts(programs, plan.step.plans, planner, left, plan.step.headroom_bytes, trains=module.training)
    vars(module).setdefault(STATE, _Rewritten(plan)).plan = plan


def restore(module: nn.Module) -> None:
    """Undoes `rematerialize`, of submodules as well; does nothing to a module that is not rewritten."""
    for m in module.modules():
        restore_resharding(m)
        if vars(m).pop(STATE, None) is not None:
            unbind(m)


def current_plan(module: nn.Module) -> Plan | None:
    """The plan that the module runs by, or None."""
    state = vars(module).get(STATE)
    return None if state is None else state.plan


@contextmanager
def watched(module: nn.Module, watch: Watch | None = None) -> Generator[set[Program]]:
    """What the programs of the module and its submodules run inside is told to `watch`; the programs that run."""
    states, ran = _states(module), set[Program]()
    for state in states:
        state.watch, state.ran = watch, ran
    try:
        yield ran
    finally:
        for state in states:
            state.watch = None


def programs_in(module: nn.Module) -> set[Program]:
    """The programs by which the module and its submodules run."""
    sizes = (sizes for state in _states(module) for sizes in state.programs.values())
    return {program for programs in sizes for program in programs.values() if program is not None}


def num_profiled(modules: Iterable[nn.Module]) -> int:
    """How many graphs were profiled while modules and their submodules ran: measured meanwhile was that as well."""
    return sum(state.later.num_profiled for module in modules for state in _states(module))


def compile_programs(modules: Iterable[nn.Module], compiler: StretchCompiler) -> None:
    """Hands the stretches of modules and their submodules to a compiler, those of later programs too."""
    for state in (state for module in modules for state in _states(module)):
        state.compile(compiler)


def _states(module: nn.Module) -> list[_Rewritten]:
    return [vars(m)[STATE] for m in module.modules() if STATE in vars(m)]


class Rewriting:
    """How a module and its submodules are rewritten at the moment, to be put back."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._states = [(m, vars(m)[STATE]) for m in module.modules() if STATE in vars(m)]
        units = ((m, planned_resharding(m)) for m in gathering_units(module))
        self._resharding = [(unit, reshards) for unit, reshards in units if reshards is not None]

    def put_back(self) -> None:
        """Rewrites the module as it was."""
        restore(self.module)
        for unit, reshards in self._resharding:
            set_reshards(unit, reshards)
        for m, state in self._states:
            _put(m, state)

    @contextmanager
    def suspended(self) -> Generator[None]:
        """The plain module inside."""
        restore(self.module)
        try:
            yield
        finally:
            self.put_back()

    @contextmanager
    def replaced(self) -> Generator[None]:
        """The plain module, to be rewritten anew; where that fails, as it was."""
        restore(self.module)
        try:
            yield
        except BaseException:
            self.put_back()
            raise


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a rewritten module.

    Code that is exported around it, or captured to be planned, sees the plain one, and so does what a training step
    calls compiled; other code that users compile around it is interrupted by it.
    """
    if is_captured() or captures_here():
        return type(self).forward(self, *args, **kwargs)
    if not torch.compiler.is_compiling():
        return _run(called(self, sys._getframe(1)), args, kwargs)  # pyright: ignore[reportPrivateUsage]
    state: _Rewritten | None = vars(self).get(STATE)
    return type(self).forward(self, *args, **kwargs) if state and state.is_in_step else _run_apart(self, args, kwargs)


def _run(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By its programs, or plain where that is what is meant, as in `torch.utils.checkpoint`.

    That counts what its two runs save, and keeps nothing of it.
    """
    original = type(self).forward
    state: _Rewritten | None = vars(self).get(STATE)
    if state is None or not state.parts or not torch.is_grad_enabled() or is_in_checkpoint():
        return original(self, *args, **kwargs)
    if not (self.training or state.serves_eval):
        return original(self, *args, **kwargs)
    if original is not state.original:
        reason = "its class has another forward now; call rematerialize again"
    elif (reason := in_the_way()) is None:
        try:
            return state(self, args, kwargs)
        except CaptureError as error:
            reason = f"it is not captured any more: {error}; call rematerialize again"
            if error.is_final:
                restore(self)
    warnings.warn(f"{type(self).__name__} runs without rematerialization because {reason}", stacklevel=2)
    return original(self, *args, **kwargs)


_run_apart: Callable[..., Any] = torch.compiler.disable(_run, reason="a rematerialized module runs by its schedule")  # pyright: ignore
