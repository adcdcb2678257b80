"""Training steps between which something changes, as plain PyTorch runs them and rewritten at the lowest peak.

A case is a module class: `change(k)` sets what step k finds, `batch(k)` makes its arguments, `step(*batch)` trains.
"""

from __future__ import annotations

import copy
import random
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from enum import Flag, auto
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_remat import Graph, InfeasibleBudgetError, Schedule, TraceError, rematerialize
from lightning_remat.execution.rewriter import watched
from lightning_remat.lowering import lower_kept

WIDTH, BATCH, STEPS = 8, 64, 5


class Outcome(Flag):
    """What may become of a case; each is the plain run, bit for bit."""

    EXACT = auto()  # rewritten in every step
    PARTLY = auto()  # rewritten, and plain with a warning in some steps
    PLAIN = auto()  # plain, with a warning
    REFUSED = auto()  # an error of `rematerialize`


def slow(case: type[Halves]) -> Any:
    """A case that takes seconds, for `parametrize`."""
    return pytest.param(case, marks=pytest.mark.slow)


def failing(case: type[Halves], reason: str) -> Any:
    """A case that is known to fail, for `parametrize`."""
    return pytest.param(case, marks=pytest.mark.xfail(strict=True, reason=reason))


def stack(depth: int = 2) -> nn.Sequential:
    """Layers that are worth recomputing."""
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.Sigmoid())))


def keeping_nothing(graph: Graph, budget_bytes: int) -> Schedule:
    """A planner that recomputes all it can, whatever the budget."""
    return lower_kept(graph, ())


class Halves(nn.Module):
    """Layers, what a case does `between`, and layers again, so that it lies where things are recomputed.

    Attributes:
        room: The budget as a multiple of the lowest peak in step 0, as other steps may need more.
        planner: That of `rematerialize`.
    """

    room = 1.5
    planner: Any = staticmethod(keeping_nothing)

    def __init__(self) -> None:
        super().__init__()
        self.head, self.tail = stack(), stack()

    def between(self, h: Tensor) -> Tensor:
        """What the case is about."""
        return h

    def forward(self, x: Tensor) -> Any:
        return self.tail(self.between(self.head(x)))

    def change(self, k: int) -> None:
        """Sets what step k finds."""

    def batch(self, k: int) -> tuple[Any, ...]:
        """The arguments of step k."""
        return (torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(k), dtype=torch.float32),)

    def step(self, *batch: Any) -> Tensor:
        """A forward and its backward."""
        loss = self(*batch).square().mean()
        loss.backward()
        return loss


class _Recomputations:
    """Counts what is computed again."""

    count = 0

    def ended(self, name: str, made: list[Any], *, is_first: bool) -> None:
        self.count += not is_first


_OURS = {"_rematerialization", "_replicate_for_data_parallel", "__getstate__"}


def state_of(module: nn.Module) -> dict[str, Any]:
    """All that a step may change: tensors, gradients, plain attributes, generators; comparable with `==`."""
    found: dict[str, Any] = {}
    for path, m in module.named_modules():
        kept = {name: value for name, value in vars(m).items() if name not in _OURS}
        if not isinstance(m, torch.jit.ScriptModule):
            found |= {f"{path}.{name}": _frozen(v, ()) for name, v in kept.items() if not _is_ours(name, v)}
    found |= {f"gradient of {n}": _frozen(p.grad, ()) for n, p in module.named_parameters()}
    found["torch's generator"] = _frozen(torch.get_rng_state(), ())
    found["numpy's generator"] = _frozen(np.random.get_state(legacy=False), ())  # noqa: NPY002
    found["Python's generator"] = random.getstate()
    found["the default dtype"] = torch.get_default_dtype()
    found["the mode of gradients"] = torch.is_grad_enabled()
    return found


def _is_ours(name: str, value: Any) -> bool:
    return name == "forward" and getattr(value, "__module__", "") == "lightning_remat.execution.rewriter"


def _frozen(value: Any, above: tuple[int, ...]) -> Any:
    if isinstance(value, Tensor):
        bits = value.detach().reshape(-1).contiguous().view(torch.uint8)
        return value.dtype, tuple(value.shape), value.requires_grad, bits.numpy().tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return _frozen(value.bit_generator.state, above)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, weakref.ref):
        return _frozen(value(), above)
    if id(value) in above:
        return "itself"
    above = (*above, id(value))
    if isinstance(value, Mapping):
        return [(key, _frozen(v, above)) for key, v in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [_frozen(v, above) for v in value]
    if hasattr(value, "__dict__"):
        return type(value).__qualname__, _frozen(vars(value), above)
    return value


def _train(module: Halves, steps: int) -> list[dict[str, Any]]:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    found: list[dict[str, Any]] = []
    for k in range(steps):
        module.change(k)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
        optimizer.zero_grad()
        loss = module.step(*module.batch(k))
        found.append({"loss": _frozen(loss, ()), **state_of(module)})
        optimizer.step()
        found[-1] |= {f"new {n}": _frozen(p, ()) for n, p in module.named_parameters()}
    module.change(0)
    return found


def outcome_of(case: Callable[[], Halves], steps: int = STEPS) -> Outcome:
    """Trains a case plain and rewritten at its lowest peak, and tells how it was run.

    Raises:
        AssertionError: Anything differs in any bit, or it ran plain without a word.
    """
    torch.manual_seed(0)
    plain = case()
    plain.change(0)
    ours = copy.deepcopy(plain)
    wanted = _train(plain, steps)
    ours.change(0)
    if not _rewritten(ours):
        _assert_alike(wanted, _train(ours, steps))
        return Outcome.REFUSED
    again = _Recomputations()
    with warnings.catch_warnings(record=True) as caught, watched(ours, again):
        warnings.simplefilter("default")
        found = _train(ours, steps)
    _assert_alike(wanted, found)
    texts = [str(w.message) for w in caught]
    strange = [text for text in texts if "without rematerialization" not in text]
    assert not strange, strange
    assert len(texts) < 2, texts
    assert again.count or texts, "it runs plain without a word"
    return (Outcome.PARTLY if again.count else Outcome.PLAIN) if texts else Outcome.EXACT


def _lowest_peak(module: Halves) -> int:
    """What the errors say, until there is none: a planner that knows no budgets may find that a step needs more."""
    budget = 1
    while True:
        try:
            rematerialize(module, *module.batch(0), memory_budget=budget, planner=module.planner)
            return budget
        except InfeasibleBudgetError as error:
            budget = max(budget + 1, int(error.minimum_bytes))


def _rewritten(module: Halves) -> bool:
    """Whether it can be; either way all is as it was."""
    before, tensors = state_of(module), [*map(id, (*module.parameters(), *module.buffers()))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "The .grad attribute")  # PyTorch hides it, but not where it is an error
            lowest = _lowest_peak(module)
            for budget in (int(lowest * module.room), lowest):
                plan = rematerialize(module, *module.batch(0), memory_budget=budget, planner=module.planner)
                recomputed = plan.num_recomputed if plan.step is None else plan.step.num_recomputed
                if recomputed:
                    break
            assert recomputed, "nothing is worth recomputing at the lowest peak"
        is_rewritten = True
    except TraceError:
        is_rewritten = False
    _assert_alike([before], [state_of(module)])
    assert tensors == [*map(id, (*module.parameters(), *module.buffers()))]
    return is_rewritten


def _assert_alike(wanted: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    for k, (a, b) in enumerate(zip(wanted, found, strict=True)):
        assert a.keys() == b.keys(), (k, a.keys() ^ b.keys())
        different = [name for name in a if a[name] != b[name]]
        assert not different, f"step {k}: {different[:6]}"
