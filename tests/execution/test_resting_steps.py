"""Steps in which things rest: random ones, their memory, errors in their middle, and where gradients come in."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from random_graphs import schedules
from random_modules import Scaled, common, modules, refusals_left_out
from resting_cases import Between, rested, rested_results, rested_tapes, resting_copy
from rewriting import recomputing_copy, rewrite
from test_stretches import Failing
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint
from training_steps import assert_equal_traces, loss_of, step_peak, traces
from uses import same

from lightning_remat import is_recomputing, profile, simulate, trace
from lightning_remat.execution.executor import Execution
from lightning_remat.execution.rewriter import programs_in
from lightning_remat.lowering import apply_liveness
from lightning_remat.schedules.schedule import Schedule

X = torch.randn(4, 6)


def blocks(depth: int = 3) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.Sigmoid()) for _ in range(depth))
    )


def warmed(module: nn.Module, x: Tensor = X) -> nn.Module:
    """A copy in which things rest."""
    ours = resting_copy(module, x)
    for _ in range(2):
        loss_of(ours(x)).backward()
    ours.zero_grad()
    assert rested(ours)
    return ours


@pytest.mark.slow
@pytest.mark.parametrize("examples", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_random_steps_are_the_plain_ones(examples: int) -> None:
    """The third differentiates a part alone, perhaps twice, which functions with backwards of their own refuse."""
    num_rested = 0

    @given(st.data())
    @settings(common, max_examples=examples)
    def check(data: st.DataObject) -> None:
        nonlocal num_rested
        module = data.draw(modules())
        x = torch.randn(16, module.width)
        module.shared.bias.requires_grad_(data.draw(st.booleans()))
        wanted = [data.draw(st.booleans()) for _ in range(8)]
        outputs = data.draw(st.sampled_from([(0,), (1,), (0, 1), (1, 0)]))
        is_twice = data.draw(st.booleans()) and all(step.kind != "function" for step in module.steps)

        def use(m: nn.Module) -> list[Any]:
            found: list[Any] = []
            for k in range(4):
                torch.manual_seed(k)
                m.zero_grad()
                made = m(x + k)
                if k != 2:
                    loss_of(made).backward()
                    found += [None if p.grad is None else p.grad.clone() for p in m.parameters()]
                    continue
                ps = [p for n, p in enumerate(m.parameters()) if wanted[n % 8] and p.requires_grad]
                for n in outputs if ps else ():
                    loss = made[n].sum()
                    if not loss.requires_grad:
                        continue
                    is_kept = n != outputs[-1] or is_twice
                    once = torch.autograd.grad(loss, ps, None, is_kept, create_graph=is_twice, allow_unused=True)
                    found += [None if g is None else g.detach() for g in once]
                    again = [g.square().sum() for g in once if g is not None and g.requires_grad]
                    if again:
                        found += torch.autograd.grad(sum(again), ps, retain_graph=is_kept, allow_unused=True)
            return [*found, *(b.clone() for b in m.buffers())]

        with refusals_left_out():
            plain = use(copy.deepcopy(module))
        graph = profile(trace(module, x), x, repeats=1)
        schedule = data.draw(schedules(graph, in_forward=False))
        note(f"{schedule}")
        ours = copy.deepcopy(module)
        rewrite(ours, schedule, x)
        assert same(plain, use(ours))
        num_rested += any(len(p.variants) > 1 and p.variants[1] is not p for p in programs_in(ours))

    check()
    assert num_rested or examples < 10


@pytest.mark.slow
def test_memory_of_random_steps_is_what_the_simulator_says() -> None:
    num_rested = 0

    @given(st.data())
    @settings(common, max_examples=12)
    def check(data: st.DataObject) -> None:
        nonlocal num_rested
        kinds = ("linear", "relu", "batch_norm", "dropout", "add", "sigmoid", "gate", "cat", "view")
        module = data.draw(modules(kinds=kinds))
        module.returns_sum = True
        x = torch.randn(4096, module.width)
        graph = profile(trace(module, x), x, repeats=1)
        assume(all(node.num_outputs == 1 for node in graph.nodes))
        schedule = apply_liveness(graph, data.draw(schedules(graph, in_forward=False)))
        note(f"{schedule}")
        rewrite(module, schedule, x)
        peaks = [step_peak(module, x) for _ in range(4)]
        assert peaks == [pytest.approx(simulate(graph, schedule).peak_bytes, rel=0.001)] * 4
        num_rested += rested(module) > 0

    check()
    assert num_rested > 2


@pytest.mark.slow
def test_the_peak_is_that_of_the_first_step() -> None:
    x = torch.randn(512, 6)
    ours = resting_copy(blocks(), x)
    peaks = [step_peak(ours, x) for _ in range(4)]
    assert rested(ours)
    assert len(set(peaks[1:])) == 1
    assert peaks[1] == pytest.approx(peaks[0], rel=0.001)  # what is held lives while a bias's gradient is summed up
    loss = loss_of(ours(x))
    loss.backward(retain_graph=True)
    del loss
    for _ in range(2):
        assert step_peak(ours, x) == peaks[0], "by hooks from now on"


def executions() -> int:
    return sum(type(o) is Execution for o in gc.get_objects())


@pytest.mark.slow
def test_nothing_is_held_after_a_step_or_without_its_backward() -> None:
    ours = warmed(blocks())
    gc.collect()
    before = executions()
    gc.disable()
    try:
        x = X.clone()
        loss = loss_of(ours(x))
        reference = weakref.ref(x)
        del x
        assert executions() == before + 1
        loss.backward()
        assert executions() == before
        assert reference() is None, "the loss that is kept does not keep the batch"
        output = ours(X)
        assert executions() == before + 1
        del output
        assert executions() == before
    finally:
        gc.enable()


def test_an_error_in_the_middle_leaves_the_next_step_right() -> None:
    plain = blocks()
    ours = warmed(plain)
    with pytest.raises(MemoryError), Failing("sigmoid"):
        ours(X)
    loss = loss_of(ours(X))
    with pytest.raises(MemoryError), Failing("gelu"):
        loss.backward(retain_graph=True)
    assert not is_recomputing()
    ours.zero_grad()
    loss.backward()
    found = [p.grad for p in ours.parameters()]
    loss_of(plain(X)).backward()
    assert same([p.grad for p in plain.parameters()], found)
    plain.zero_grad()
    assert_equal_traces(traces(plain, [X, X + 1]), traces(ours, [X, X + 1]))


@pytest.mark.slow
def test_what_is_changed_before_it_is_read_is_refused() -> None:
    for change in ("weight", "input"):
        messages: list[str] = []
        for m in (blocks(), warmed(blocks())):
            x = X.clone()
            loss = loss_of(m(x))
            with torch.no_grad():
                (m[1][2].weight if change == "weight" else x).mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                loss.backward()
            messages.append(str(caught.value))
        assert len(messages) == 2


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a function that keeps its input": Scaled.apply,
    "checkpoint": lambda t: checkpoint(torch.sin, t, use_reentrant=False),
    "one that keeps what it reads beside others": lambda t: Scaled.apply(t) * t.sin(),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", READERS)
def test_what_others_than_autograd_hold_does_not_rest(name: str) -> None:
    def forward(m: Between, x: Tensor) -> Tensor:
        return m.c(F.gelu(m.b(READERS[name](F.gelu(m.a(x))))))

    module = Between(forward)
    ours = resting_copy(module, X)
    assert_equal_traces(traces(copy.deepcopy(module), [X, X + 1, X]), traces(ours, [X, X + 1, X]))
    assert rested(ours)


@pytest.mark.slow
def test_copies_of_a_module_run_like_it() -> None:
    plain = blocks()
    ours = warmed(plain)
    copied = copy.deepcopy(ours)
    expected = traces(copy.deepcopy(plain), [X, X + 1, X])
    replica = ours._replicate_for_data_parallel()
    assert torch.equal(replica(X), plain(X))
    assert_equal_traces(expected, traces(copied, [X, X + 1, X]))
    assert_equal_traces(expected, traces(ours, [X, X + 1, X]))
    assert rested(copied)
    assert rested(ours)


class Diamond(nn.Module):
    """What `late` saves leads to the second sine on a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q = self.first(x).sin().sin()
        return self.late(q.cos()) + q.exp()


class View(nn.Module):
    """The caller may write into what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).sin().sin()).t()


class Writes(nn.Module):
    """Gradients come from what it returns and from what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.register_buffer("state", torch.ones(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).sin().sin()
        self.state.mul_(h)
        return h.exp().tan()


def of_the_last_again(m: nn.Module) -> None:
    (gradient,) = torch.autograd.grad(m(X).sum(), m.late.weight, create_graph=True)
    gradient.square().sum().backward()


def written(m: nn.Module) -> None:
    output = m(X)
    output *= 2
    output.sum().backward()


def of_the_state(m: nn.Module) -> None:
    m.state = torch.ones(4, 6)
    m(X)
    m.state.sum().backward()
    m.state = torch.ones(4, 6)


# The first sine is discarded in the forward, and made again before the backward of what leads to none of its readers.
ENTRIES: list[tuple[Callable[[], nn.Module], str, Callable[[Any], None]]] = [
    (Diamond, "F0 F1 F2 F3 F4 F5 F6 D1 B6 D6 B5 D5 B4 D4 F1 B3 D3 B2 D2 D1 B1 B0 D0", of_the_last_again),
    (Diamond, "F0 F1 F2 F3 F4 F5 F6 D1 B6 D6 F1 B5 D5 B4 D4 B3 D3 B2 D2 D1 B1 B0 D0", of_the_last_again),
    (View, "F0 F1 F2 F3 F4 D1 F1 B4 D4 B3 D3 B2 D2 D1 B1 B0 D0", written),
    (Writes, "F0 F1 F2 F3 F4 F5 D1 B5 D5 F1 B4 D4 B3 D3 T3 B2 D2 D1 B1 B0 D0", of_the_state),
]


@pytest.mark.parametrize(("kind", "schedule", "use"), ENTRIES)
def test_gradients_that_come_from_elsewhere_meet_nothing_empty(
    kind: Callable[[], nn.Module], schedule: str, use: Callable[[Any], None]
) -> None:
    plain = kind()
    ours = copy.deepcopy(plain)
    rewrite(ours, Schedule.parse(schedule), X)
    for k in range(4):
        for m in (plain, ours):
            m.zero_grad()
            if k == 2:
                assert m is plain or rested(ours)
                use(m)
            else:
                m.get_buffer("state").detach_().fill_(1) if isinstance(m, Writes) else None
                m(X).sum().backward()
        assert same(*([p.grad for p in m.parameters()] for m in (plain, ours)))


@pytest.mark.slow
def test_a_backward_that_pytorch_captures_finds_what_rests() -> None:
    """Compiled autograd takes the graph apart before it runs any of it, and must not read what is not there yet."""
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(4)))
    ours = recomputing_copy(plain, X, kept=range(0, 12, 3))
    for captured in (False, False, True, True):
        for module in (plain, ours):
            module.zero_grad()
            loss = module(X).sum()
            capture = captured and module is ours
            with compiled_autograd._enable(torch.compile(backend="eager")) if capture else nullcontext():
                loss.backward()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert same(p.grad, q.grad)
    assert rested_tapes(ours)
    assert rested_results(ours)
