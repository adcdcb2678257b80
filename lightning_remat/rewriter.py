"""Swaps a module's forward for the executor, in place, and back."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten

from .budget import Budget, parse_budget
from .device_memory import device_memory
from .executor import run_forward
from .planner import Plan
from .planner import plan as make_plan
from .profiler import profile
from .program import Program, compile_schedule
from .schedule import Schedule
from .tracer import TracedModule, trace, training_flags

_STATE = "_rematerialization"


def rematerialize(
    module: nn.Module,
    *args: Any,
    memory_budget: Budget | None = None,
    planner: str | Callable[..., Schedule] = "auto",
    plan: Plan | None = None,
    **kwargs: Any,
) -> Plan:
    """Rewrites the module in place so that its training step peaks within the budget, with the same results.

    The step is the module's forward and backward: parameters, buffers, fresh parameter gradients, inputs, outputs,
    the outputs' gradients and everything between. `eval()` and `no_grad()` use the original forward. A plan that
    recomputes nothing leaves the plain forward in place. A second call replaces the plan.

    >>> import torch
    >>> from torch import nn
    >>> layers = [nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(8)]
    >>> module, x = nn.Sequential(*layers), torch.randn(1024, 64)
    >>> plan = rematerialize(module, x, memory_budget="70%", planner="periodic")
    >>> plan.simulation.peak_bytes <= 0.7 * plan.plain.peak_bytes
    True
    >>> module(x).sum().backward()
    >>> restore(module)

    Args:
        module: In training mode.
        *args: Example inputs, real or fake tensors.
        memory_budget: The true peak in bytes; an int, `"8GiB"`, a fraction of the device's memory, or `"50%"` of the
            plain step's peak. None stands for what the device has free.
        planner: A name of `PLANNERS` or a function.
        plan: A plan made earlier for this module, which is installed without profiling.
        **kwargs: Example keyword inputs.

    Returns:
        The plan that is in force.

    Raises:
        TraceError: The module cannot be captured.
        InfeasibleBudgetError: The planner cannot go as low.
        ValueError: A wrong budget, planner or plan. In each case the module is as it was.
    """
    with _plain(module):
        _check_rewritable(module)
        traced = trace(module, *args, **kwargs)
        if plan is None:
            graph = profile(traced, *args, **kwargs)
            whole = make_plan(graph, _no_limit, "keep_all")
            budget = _budget_bytes(memory_budget, whole, args, kwargs, module)
            plan = make_plan(graph, budget, planner)
        program = checked_program(traced, plan)
    install(module, program, plan)
    return plan


_no_limit = 1 << 62


def _check_rewritable(module: nn.Module) -> None:
    """Refuses a forward that is not the class's own; warns where the rewriting would have no effect."""
    if "forward" in vars(module):
        raise ValueError(
            f"{type(module).__name__}.forward has been replaced on this instance, by {module.forward!r}, which would "
            "not be captured. Remedy: undo that first, or rematerialize the submodules"
        )
    if not module.training:
        warnings.warn(
            f"{type(module).__name__} is in eval mode, in which its plain forward runs; call train() and rematerialize "
            "again",
            stacklevel=3,
        )


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
    vars(module)[_STATE] = _Rewritten(program, plan)
    module.forward = types.MethodType(forward, module)


def restore(module: nn.Module) -> None:
    """Undoes `rematerialize`; does nothing to a module that is not rewritten."""
    if vars(module).pop(_STATE, None) is not None:
        vars(module).pop("forward", None)


def current_plan(module: nn.Module) -> Plan | None:
    """The plan that the module runs by, or None."""
    state = vars(module).get(_STATE)
    return None if state is None else state.plan


class _plain:
    """The module without its rewriting, which comes back if the block fails."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __enter__(self) -> None:
        self.state = vars(self.module).get(_STATE)
        restore(self.module)

    def __exit__(self, kind: Any, *exc: object) -> None:
        if kind is not None and self.state is not None:
            vars(self.module)[_STATE] = self.state
            self.module.forward = types.MethodType(forward, self.module)


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


def _budget_bytes(
    budget: Budget | None, whole: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module
) -> int:
    tensors = [leaf for leaf in (*tree_flatten((args, kwargs))[0], *module.parameters()) if isinstance(leaf, Tensor)]
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    is_fake = any(isinstance(t, FakeTensor) for t in tensors)
    free, total = (0, 0) if is_fake and device.type != "cpu" else device_memory(device)
    if budget is None:
        return free
    return parse_budget(budget, plain_peak_bytes=whole.peak_bytes, device_bytes=total)
