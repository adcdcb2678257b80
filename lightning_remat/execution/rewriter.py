"""Swaps a module's forward for the executor, in place, and back."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..capture.decisions import call_key, decides_alike
from ..capture.tracer import TracedModule, trace_out_of_place
from ..module_state.nesting import flatten
from ..module_state.refusals import is_captured
from ..plans.planner import Plan
from .executor import run_forward
from .program import Program, compile_schedule
from .watch import Watch

_STATE = "_rematerialization"
_REPLICATE = "_replicate_for_data_parallel"


def as_planned(traced: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan) -> TracedModule:
    """The operations that an earlier plan is for: in-place activations are apart in some.

    Args:
        traced: The module, in-place activations in place.
        args: Positional arguments of the call that was traced.
        kwargs: Its keyword arguments.
        plan: Made for this module, or for another, of which `checked_program` tells.
    """
    names = [node.name for node in plan.graph.nodes]
    if [operation.name for operation in traced.operations] == names:
        return traced
    apart = trace_out_of_place(traced.module, *args, **kwargs)
    return apart if apart is not None and [o.name for o in apart.operations] == names else traced


def checked_program(traced: TracedModule, plan: Plan) -> Program:
    """The program of a plan, after checking that it was made for these operations.

    Raises:
        ValueError: The plan is for another module.
    """
    names = [operation.name for operation in traced.operations]
    planned = [node.name for node in plan.graph.nodes]
    if names != planned:
        difference = next((a for a, b in zip(planned, names, strict=False) if a != b), "the number of operations")
        raise ValueError(
            f"the plan has {len(planned)} operations and the module {len(names)}; the first difference is "
            f"{difference!r}. Remedy: make the plan on this module"
        )
    return compile_schedule(traced, plan.schedule)


@dataclass(slots=True)
class _Rewritten:
    """What `install` leaves on a module: shared by its copies, gone from its pickle."""

    program: Program | None
    plan: Plan | None
    run: Callable[..., Any] | None
    watch: Watch | None = None
    verdicts: dict[Hashable, bool] = field(default_factory=dict[Hashable, bool])

    def is_for(self, module: nn.Module, tensors: list[Tensor]) -> bool:
        """Whether the program is that of a call on these inputs; found out once for each kind of inputs."""
        traced = cast(Program, self.program).traced
        if not traced.decisions:
            return True
        key = call_key(tensors)
        if key not in self.verdicts:
            self.verdicts[key] = key == traced.call_key or decides_alike(module, traced.decisions, tensors)
        return self.verdicts[key]

    def __deepcopy__(self, memo: Any) -> _Rewritten:
        return self

    def __reduce__(self) -> Any:
        return _Rewritten, (None, None, None)


def install(module: nn.Module, program: Program, plan: Plan) -> None:
    """Puts the program in the place of the module's forward; one that changes nothing leaves it."""
    restore(module)
    if plan.num_recomputed or plan.peak_bytes < plan.plain.peak_bytes:
        forced(module, program, plan)


def forced(module: nn.Module, program: Program, plan: Plan) -> None:
    """Puts the program in the place of the module's forward even if it recomputes nothing, to measure its cost."""
    _put(module, _Rewritten(program, plan, _uncompiled()))


def _put(module: nn.Module, state: _Rewritten) -> None:
    vars(module)[_STATE] = state
    if state.program is not None:
        _bind(module)


def _bind(module: nn.Module) -> None:
    module.forward = types.MethodType(forward, module)
    vars(module)[_REPLICATE] = types.MethodType(_replicate_for_data_parallel, module)


def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """What `DataParallel` runs on each device: a shallow copy, whose forward must be its own."""
    replica = type(self)._replicate_for_data_parallel(self)  # pyright: ignore[reportPrivateUsage]
    _bind(replica)
    return replica


def install_regions(module: nn.Module, programs: Mapping[str, Program], plan: Plan) -> None:
    """Puts the programs in the place of the forwards of the submodules that they are named by.

    Args:
        module: Keeps its own forward.
        programs: Submodule name → its program.
        plan: The plan of the whole, which holds those of the parts.
    """
    assert plan.step is not None
    restore(module)
    for name, program in programs.items():
        install(module.get_submodule(name), program, plan.step.plans[name])
    vars(module)[_STATE] = _Rewritten(None, plan, None)


def restore(module: nn.Module) -> None:
    """Undoes `rematerialize`, of submodules as well; does nothing to a module that is not rewritten."""
    for m in module.modules():
        if vars(m).pop(_STATE, None) is not None:
            vars(m).pop("forward", None)
            vars(m).pop(_REPLICATE, None)


def current_plan(module: nn.Module) -> Plan | None:
    """The plan that the module runs by, or None."""
    state = vars(module).get(_STATE)
    return None if state is None else state.plan


@contextmanager
def watched(module: nn.Module, watch: Watch) -> Generator[None]:
    """What the programs of the module and its submodules run inside is told to `watch`."""
    states: list[_Rewritten] = [vars(m)[_STATE] for m in module.modules() if _STATE in vars(m)]
    for state in states:
        state.watch = watch
    try:
        yield
    finally:
        for state in states:
            state.watch = None


class Rewriting:
    """How a module and its submodules are rewritten at the moment, to be put back."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._states = [(m, vars(m)[_STATE]) for m in module.modules() if _STATE in vars(m)]

    def put_back(self) -> None:
        """Rewrites the module as it was."""
        restore(self.module)
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
    """The forward of a rewritten module; `torch.compile` leaves it as it is."""
    return vars(self)[_STATE].run(self, *args, **kwargs)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    state: _Rewritten | None = vars(self).get(_STATE)
    original = type(self).forward
    is_plain = state is None or state.program is None or not self.training or not torch.is_grad_enabled()
    if is_plain or is_captured():
        return original(self, *args, **kwargs)
    assert state is not None
    assert state.program is not None
    leaves, spec = flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    traced = state.program.traced
    if spec != traced.call_spec or not _same_constants(leaves, traced.call_leaves):
        reason = "its arguments are not those that were traced"
    elif torch._C._functorch.maybe_current_level() is not None:  # pyright: ignore
        reason = "it is called in a transform of torch.func, which takes no saved-tensor hooks"
    elif not state.is_for(self, tensors):
        reason = "it decides on inputs of these sizes or types otherwise than on those that it was traced with"
    else:
        reason = traced.fingerprint.difference(self)
    if reason is not None:
        warnings.warn(
            f"{type(self).__name__} runs without rematerialization because {reason}; call rematerialize again",
            stacklevel=2,
        )
        return original(self, *args, **kwargs)
    return run_forward(state.program, self, tensors, state.watch)


@functools.cache
def _uncompiled() -> Callable[..., Any]:
    """`_forward` for a module that is part of a compiled one: there it runs as it is."""
    reason = "a rematerialized module runs by its schedule, which no compiler keeps; compile submodules instead"
    return cast(Any, torch.compiler).disable(_forward, reason=reason)


def _same_constants(leaves: list[Any], traced: tuple[Any, ...]) -> bool:
    for leaf, constant in zip(leaves, traced, strict=True):
        if isinstance(leaf, Tensor) != (constant is None) and not (leaf is None and constant is None):
            return False
        if not isinstance(leaf, Tensor) and leaf != constant:
            return False
    return True
