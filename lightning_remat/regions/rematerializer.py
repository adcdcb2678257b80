"""`rematerialize`: trace, profile, plan and rewrite in one call, the module as a whole or part by part."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit import ScriptModule

from ..budget import Budget, check_budget, parse_budget
from ..capture.tracer import capture_call, ways_of
from ..devices import device_of
from ..errors import TraceError, check_kind
from ..execution.assembly import checked_program
from ..execution.compiling import StretchCompiler
from ..execution.rewriter import Rewriting, compile_programs, install, programs_in, restore
from ..lowering import keep_everything
from ..measure.bandwidth import Bandwidth, check_bandwidth
from ..measure.device_memory import device_memory
from ..measure.tensor_bytes import storage_bytes
from ..module_state.ambient import outside_inference
from ..module_state.batches import tensors_held
from ..module_state.random_state import preserved_random
from ..module_state.refusals import reason_against
from ..module_state.sharding import has_units
from ..operations.functions import may_draw_unseen
from ..operations.operation import TracedModule
from ..plans.plan import Plan
from ..plans.planner import planner_of
from ..schedules.schedule import Schedule
from .fit import check_fit
from .footprint import owned_tensors
from .rewriter import rewrite_regions
from .search import is_exchanged
from .self_check import find_difference
from .step_run import step_outcome
from .whole import rewrite_whole

logger = logging.getLogger("lightning_remat")


def rematerialize(
    module: nn.Module,
    *args: Any,
    memory_budget: Budget | None = None,
    planner: str | Callable[..., Schedule] = "auto",
    plan: Plan | None = None,
    self_check: bool = False,
    gather_bandwidth: Bandwidth | None = None,
    **kwargs: Any,
) -> Plan:
    """Rewrites the module in place so that its training step peaks within the budget, with the same results.

    The step is the module's forward and backward: parameters, buffers, fresh parameter gradients, inputs, outputs,
    the outputs' gradients and everything between. What a loss outside holds besides, the logarithms of a softmax, say,
    and an optimizer's state are not known here: a module that returns its loss is planned with that. Of logits beside
    it a gradient counts, too, as one may be asked for: `find_batch_size` and the callback see what is. The plain step,
    where it fits, and the planned one are run once, and undone, so that both peaks are measured ones; on fake tensors,
    and of a module in eval mode, they are predictions. Where operations are short, three plain steps are timed, too:
    calls of modules count in the step that recomputation is told a fraction of (not of a module that is captured as a
    whole and draws random numbers, as other threads may meanwhile).
    `eval()` and `no_grad()` use the original forward. A plan that recomputes nothing leaves the plain forward in place.
    A second call replaces the plan. Where the budget cannot be met otherwise, in-place activations run out of place,
    which lets their inputs go earlier in the backward.

    A module whose own forward cannot be captured is rewritten part by part: the outermost submodules that can be
    captured share the budget, and the planned step is run once or twice, without a trace, to measure what the code
    between them needs. `plan.rung` and `plan.reasons` tell which way was taken and why; so does the log, once.

    So is a module under `fully_shard` (FSDP2), by a call on every process: the outermost parts that go through no more
    than one gather are captured as they run. The budget is that of one process, on which shards, gathers and full
    gradients count; all processes have the plan that the first one makes of its profile.

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
            plain step's peak. None stands for what the device has free, beside what is the module's already.
        planner: A name of `PLANNERS` or a function.
        plan: A plan made earlier for this module and inputs of these types and sizes, which is installed without
            profiling.
        self_check: Whether one step with and without the plan is compared first, bit by bit: outputs, gradients of
            parameters and inputs, buffers, random states. On a difference a warning names the first operation that
            differs, and the plain module is left in place; the plan returned then keeps everything.
        gather_bandwidth: Bytes a second that a process receives while the parameters of a unit under `fully_shard` are
            gathered, or `"measure"`. With it is planned, too, which units are resharded after their forward, which
            frees their parameters for a second gather, and which stay gathered. None leaves that as it was set.
        **kwargs: Example keyword inputs.

    Returns:
        The plan that is in force.

    Raises:
        TraceError: Neither the module nor any part of it can be captured.
        InfeasibleBudgetError: The planner cannot go as low.
        TypeError: It is no module, or what is for this function was given as one of the module's inputs.
        ValueError: A wrong budget, planner or plan. In each case the module is as it was.
    """
    check_kind(module, nn.Module, "the first argument of rematerialize, before the module's own inputs")
    _check_inputs(module, args, kwargs)
    planner_of(planner)
    if memory_budget is not None:
        check_budget(memory_budget)
    check_bandwidth(gather_bandwidth)
    if plan is not None and not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"plan is {plan!r}, expected a Plan")
    with outside_inference(), Rewriting(module).replaced():
        _check_rewritable(module)
        budget_of = _budget(memory_budget, args, kwargs, module)
        traced = _traced(module, args, kwargs)
        if isinstance(traced, TraceError):
            made = rewrite_regions(
                module,
                args,
                kwargs,
                traced,
                budget_of=budget_of,
                planner=planner,
                plan=plan,
                gather_bandwidth=gather_bandwidth,
            )
        elif plan is None:
            draws_unseen = any(may_draw_unseen(part) for o in traced.operations for part in o.parts)
            # What else is drawn while it is planned, is drawn from generators of its own.
            with preserved_random() if draws_unseen else nullcontext():
                made = rewrite_whole(module, args, kwargs, traced, budget_of=budget_of, planner=planner)
        else:
            check_fit(plan.graph, module, args, kwargs)
            install(module, checked_program(ways_of(traced, args, kwargs), plan), plan, planner)
            made = plan
        if self_check:
            made = _checked(module, args, kwargs, made)
    _log(module, made, is_given=plan is not None)
    return made


def compile_stretches(module: nn.Module, **options: Any) -> int:
    """Hands what a rematerialized module computes again, stretch by stretch, to `torch.compile`.

    A stretch of many small operations is then a few kernels, in all further backwards. What is computed again is as
    exact as `torch.compile` is: its kernels may round otherwise than those of the forward, and its memory within a
    stretch is the compiler's, which the plan has not counted. Random operations, and those of which autograd must save
    something again, stay as they are.

    >>> import torch
    >>> from torch import nn
    >>> module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Tanh()) for _ in range(8)))
    >>> plan = rematerialize(module, torch.randn(1024, 64), memory_budget="60%")
    >>> compile_stretches(module, backend="aot_eager") > 0
    True

    Args:
        module: What `rematerialize` has rewritten, or what the callback has, once training has begun.
        **options: Keyword arguments of `torch.compile`.

    Returns:
        How many stretches are compiled when they first run.

    Raises:
        ValueError: Nothing of it is rematerialized.
    """
    if not programs_in(module):
        raise ValueError(f"{type(module).__name__} is not rematerialized. Remedy: call rematerialize first")
    compiler = StretchCompiler(**options)
    compile_programs([module], compiler)
    return compiler.num_stretches


def _checked(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan) -> Plan:
    """The plan if its step is exactly the plain one; else the plan to keep everything, which is then in force."""
    if any(isinstance(t, FakeTensor) for t in tensors_held((args, kwargs))):
        raise ValueError("self_check compares values, which fake tensors do not have: give real inputs")
    difference = find_difference(module, lambda: step_outcome(module, args, kwargs))
    if difference is None:
        return plan
    message = f"{type(module).__name__} is left as it is: {difference}"
    warnings.warn(message, stacklevel=4)
    restore(module)
    return replace(
        plan,
        planner="keep_all",
        budget_bytes=max(plan.budget_bytes, plan.plain.peak_bytes),
        schedule=keep_everything(plan.graph),
        simulation=plan.plain,
        reasons=(*plan.reasons, message),
        step=None,
        correction_bytes=0,
    )


def _traced(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedModule | TraceError:
    try:
        if has_units(module):
            raise TraceError(f"{type(module).__name__} is sharded, so that no more than a unit of it is in one piece")
        if is_exchanged(module):
            raise TraceError(f"{type(module).__name__} holds a compiled part or a bounded deque, which stays as it is")
        return capture_call(module, args, kwargs)[0]
    except TraceError as error:
        return error


def _log(module: nn.Module, plan: Plan, *, is_given: bool) -> None:
    """What is in force from now on, in one line, and a line for each part that is treated otherwise."""
    ways = {
        "traced": "captured as a whole",
        "regions": "its own forward cannot be captured, so its parts are rematerialized one by one under one budget: "
        + ", ".join(plan.step.plans if plan.step is not None else ()),
    }
    name, again = type(module).__name__, plan.num_recomputed
    does = "recomputes nothing, since everything fits"
    if again:
        does = f"recomputes {again} operations for {plan.recompute_overhead:.1%} more time"
    whose = "by the plan it was given" if is_given else ways.get(plan.rung, "")
    logger.info("%s", "\n  ".join([f"{name} {does} ({whose})", *plan.reasons]))


def _check_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a budget, or the name of a planner, that was given like an input of the module's own.

    Raises:
        TypeError: The last input is a number or a text, and the forward does not take so many.
    """
    if not args or not isinstance(args[-1], str | int | float) or isinstance(module, ScriptModule):
        return  # Python knows no signature of what TorchScript has compiled
    try:
        inspect.signature(module.forward, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{type(module).__name__}.forward cannot be called with {args[-1]!r} as its input number {len(args)}: "
            f"{error}. Remedy: give what is for rematerialize by name, as memory_budget={args[-1]!r}"
        ) from None


def _check_rewritable(module: nn.Module) -> None:
    """Refuses what cannot be rewritten; warns where the rewriting would have no effect."""
    if (reason := reason_against(module)) is not None:
        raise ValueError(f"cannot rematerialize: {reason}")
    if "forward" in vars(module):
        replaced: Any = vars(module)["forward"]
        name = getattr(replaced, "__qualname__", type(replaced).__name__)
        raise ValueError(
            f"{type(module).__name__}.forward has been replaced on this instance, by {replaced.__module__}.{name}, "
            "which would not be captured. Remedy: rematerialize it before that is done, or its submodules"
        )
    if not module.training:
        warnings.warn(
            f"{type(module).__name__} is in eval mode, in which its plain forward runs; call train() and rematerialize "
            "again",
            stacklevel=3,
        )


def _budget(
    budget: Budget | None, args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module
) -> Callable[[int], int]:
    """The budget in bytes as a function of the plain step's peak.

    Raises:
        ValueError: It has none of the accepted forms.
    """
    tensors: list[Tensor] = [*tensors_held((args, kwargs)), *module.parameters()]
    device = device_of(tensors)
    is_fake = any(isinstance(t, FakeTensor) for t in tensors)
    free, total = (0, 0) if is_fake and device.type != "cpu" else device_memory(device)
    held = storage_bytes(t for t in [*owned_tensors(module), *tensors] if not isinstance(t, FakeTensor))

    def in_bytes(plain_peak_bytes: int) -> int:
        if budget is None:
            return free + held
        return parse_budget(budget, plain_peak_bytes=plain_peak_bytes, device_bytes=total)

    return in_bytes
