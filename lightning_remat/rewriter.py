"""Swaps a module's forward for the executor, in place, and back."""

from __future__ import annotations

import types
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from .executor import run_forward
from .planner import Plan
from .program import Program, compile_schedule
from .tracer import TracedModule, training_flags

_STATE = "_rematerialization"


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

    def __deepcopy__(self, memo: Any) -> _Rewritten:
        return self

    def __reduce__(self) -> Any:
        return _Rewritten, (None, None)


def install(module: nn.Module, program: Program, plan: Plan) -> None:
    """Puts the program in the place of the module's forward; one that recomputes nothing leaves it."""
    restore(module)
    if plan.num_recomputed:
        forced(module, program, plan)


def forced(module: nn.Module, program: Program, plan: Plan) -> None:
    """Puts the program in the place of the module's forward even if it recomputes nothing, to measure its cost."""
    _put(module, _Rewritten(program, plan))


def _put(module: nn.Module, state: _Rewritten) -> None:
    vars(module)[_STATE] = state
    if state.program is not None:
        module.forward = types.MethodType(forward, module)


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
    vars(module)[_STATE] = _Rewritten(None, plan)


def restore(module: nn.Module) -> None:
    """Undoes `rematerialize`, of submodules as well; does nothing to a module that is not rewritten."""
    for m in module.modules():
        if vars(m).pop(_STATE, None) is not None:
            vars(m).pop("forward", None)


def current_plan(module: nn.Module) -> Plan | None:
    """The plan that the module runs by, or None."""
    state = vars(module).get(_STATE)
    return None if state is None else state.plan


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
    """The forward of a rewritten module."""
    state: _Rewritten | None = vars(self).get(_STATE)
    original = type(self).forward
    if state is None or state.program is None or not self.training or not torch.is_grad_enabled():
        return original(self, *args, **kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    traced = state.program.traced
    reason = None
    if spec != traced.call_spec or not _same_constants(leaves, traced.call_leaves):
        reason = "its arguments are not those that were traced"
    elif training_flags(self) != traced.training:
        reason = "the training flags of its submodules have changed"
    if reason is not None:
        warnings.warn(
            f"{type(self).__name__} runs without rematerialization because {reason}; call rematerialize again",
            stacklevel=2,
        )
        return original(self, *args, **kwargs)
    return run_forward(state.program, self, [leaf for leaf in leaves if isinstance(leaf, Tensor)])


def _same_constants(leaves: list[Any], traced: tuple[Any, ...]) -> bool:
    for leaf, constant in zip(leaves, traced, strict=True):
        if isinstance(leaf, Tensor) != (constant is None) and not (leaf is None and constant is None):
            return False
        if not isinstance(leaf, Tensor) and leaf != constant:
            return False
    return True
