"""An output that its own operation has saved gives up its storage, and gets that of the one which is made again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from resting_cases import Before, Between, assert_right_after_a_failed_fill, rested_results
from rewriting import recomputing_copy
from torch import Tensor, nn
from training_steps import assert_equal_traces, step_peak, traces
from uses import same

from lightning_remat import devices, profile, trace
from lightning_remat.execution.resting_storages import RestingResult
from lightning_remat.execution.rewriter import watched

X = torch.randn(4, 6)

SAVED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sigmoid": lambda m, x: m.c(m.b(m.a(x).sigmoid()).sigmoid()),
    "tanh": lambda m, x: m.c(m.a(x).tanh() * m.b(x)),
    "relu": lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))),
    "relu in place": lambda m, x: m.c(F.relu(F.batch_norm(m.a(x), None, None, training=True), inplace=True)),
    "softmax": lambda m, x: m.c(m.a(x).softmax(1) * m.b(x).log_softmax(0)),
    "exp": lambda m, x: m.c(m.a(x).exp().sqrt().rsqrt()),
    "not contiguous": lambda m, x: m.c(m.a(x).t().sigmoid() @ m.b(x)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", SAVED)
@pytest.mark.usefixtures("memory_changes_hands")
def test_steps_are_the_plain_ones(name: str) -> None:
    module, batches = Before(SAVED[name]), [X, X + 1, X[:3], X - 1, X[:2]]
    ours = recomputing_copy(module, X)
    assert_equal_traces(traces(copy.deepcopy(module), batches), traces(ours, batches))
    assert rested_results(ours)


@pytest.mark.usefixtures("memory_changes_hands")
def test_memory_is_given_up_and_no_more_is_needed_than_in_the_first_step() -> None:
    module, x = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()) for _ in range(12))), torch.randn(256, 6)
    ours = recomputing_copy(module, x, kept=range(0, 24, 7))
    peaks = [step_peak(ours, x) for _ in range(3)]
    assert rested_results(ours) > 5
    assert max(peaks[1:]) <= peaks[0] < step_peak(module, x)


def test_a_large_one_keeps_its_hooks() -> None:
    module, x = Between(lambda m, x: m.c(m.a(x).sigmoid())), torch.randn(1 << 14, 6)
    graph = profile(trace(module, x), x, repeats=1)
    assert [node.held for node in graph.nodes if node.kind == "sigmoid"] == [()]
    graph = profile(trace(module, X), X, repeats=1)
    assert [node.held for node in graph.nodes if node.kind == "sigmoid"] == [(1,)]
    ours = recomputing_copy(module, x)
    assert_equal_traces(traces(copy.deepcopy(module), [x, x]), traces(ours, [x, x]))
    assert not rested_results(ours)


@pytest.mark.parametrize(
    "does",
    [
        lambda m, x: m.c(m.a(x).sigmoid().view(-1, 2, 3).flatten(1) * m.b(x)),
        lambda m, x: m.c(torch.cat([(h := m.a(x).tanh().chunk(2, 1))[1], h[0].sin()], 1)),
    ],
)
def test_one_of_which_there_are_views_keeps_its_hooks(does: Any) -> None:
    module = Before(does)
    ours = recomputing_copy(module, X)
    batches = [X, X + 1, X[:3]]
    assert_equal_traces(traces(copy.deepcopy(module), batches), traces(ours, batches))
    assert not rested_results(ours)


def test_one_that_is_returned_again_beside_another_keeps_its_memory() -> None:
    def does(m: Before, x: Tensor) -> Tensor:
        a, b = torch.broadcast_tensors(m.a(x).sigmoid(), torch.stack([m.b(x)] * 2))
        return m.c(a.sin() * b)

    module = Before(does)
    ours = recomputing_copy(module, X)
    batches = [X, X + 1, X[:3]]
    assert_equal_traces(traces(copy.deepcopy(module), batches), traces(ours, batches))


def test_what_somebody_keeps_of_the_first_step_does_not_rest() -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    class Keeps:
        def ended(self, name: str, made: list[Any], *, is_first: bool) -> None:
            if name.startswith("sigmoid"):
                kept.append((made[0].detach(), made[0].clone()))

    module = Before(SAVED["sigmoid"])
    ours = recomputing_copy(module, X)
    with watched(ours, Keeps()):
        ours(X).backward()
    assert len(kept) == 4
    ours(X).backward()
    assert not rested_results(ours)
    assert all(same(a, b) for a, b in kept)


def test_hooks_around_a_forward_have_it_in_their_keeping() -> None:
    module = Before(SAVED["sigmoid"])
    ours = recomputing_copy(module, X)
    for _ in range(2):
        ours(X).backward()
    assert rested_results(ours)
    for m in (module, ours):
        m.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            loss = m(X)
        loss.backward()
    for name, p in module.named_parameters():
        assert p.grad is None or same(p.grad, ours.get_parameter(name).grad)


def test_a_step_that_failed_while_filling_leaves_the_next_one_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_right_after_a_failed_fill(Before(SAVED["tanh"]), X, RestingResult, monkeypatch)


def test_a_recomputation_of_another_size_is_an_error_that_names_the_operation() -> None:
    made = X.clone().requires_grad_().sigmoid()
    result, values, before = RestingResult(0, "block.sigmoid"), list[Any]([None]), made.detach().clone()
    result.rest(values, made)
    assert not made.untyped_storage().nbytes()
    with pytest.raises(RuntimeError, match=r"block.sigmoid saved other tensors .*of \[96\] bytes then, \[120\] now"):
        result.fill(values, torch.randn(5, 6))
    again = result.fill(values, before.clone())
    assert values == [None]
    assert same(made.detach(), before)
    assert again.data_ptr() == made.data_ptr(), "one memory, not two"


@pytest.mark.skipif(not devices.can_forbid_access, reason="in this build of PyTorch it is a null pointer")
def test_who_reads_it_too_early_gets_an_error_that_names_the_operation() -> None:
    x = X.clone().requires_grad_()
    result, values, made = RestingResult(0, "block.sigmoid"), list[Any]([None]), x.sigmoid()
    result.rest(values, made)
    for reads in (lambda: made.sum(), lambda: torch.autograd.grad(made, x, X, retain_graph=True)):
        with pytest.raises(RuntimeError, match=r"what block.sigmoid saved for its backward is read before it was made"):
            reads()
    result.fill(values, X.sigmoid())
    (gradient,) = torch.autograd.grad(made, x, X)
    assert same(gradient, torch.autograd.grad((y := X.clone().requires_grad_()).sigmoid(), y, X)[0])


@pytest.mark.parametrize("is_held", [False, True])
def test_what_others_hold_of_a_recomputation_stays_theirs(is_held: bool) -> None:
    result, values, made = RestingResult(0, "sigmoid"), list[Any]([None]), X.clone().requires_grad_().sigmoid()
    expected, again = made.detach().clone(), X.sigmoid()
    result.rest(values, made)
    held = again.view(-1) if is_held else None
    result.fill(values, again)
    assert same(made.detach(), expected)
    assert held is None or same(held, expected.view(-1))


@pytest.mark.parametrize("holds", [lambda t: None, lambda t: t.detach(), lambda t: t.detach().numpy()])
@pytest.mark.parametrize("is_known", [True, False])
def test_what_others_hold_stays(holds: Callable[[Tensor], Any], is_known: bool) -> None:
    result, values = RestingResult(0, "sigmoid"), list[Any]([None])
    if is_known:
        result.rest(values, X.clone().requires_grad_().sigmoid())
        assert values[0] is not None
    made, values[0] = X.clone().requires_grad_().sigmoid(), None
    held = holds(made)
    result.rest(values, made)
    assert (values[0] is None) == (held is not None)
    assert bool(made.untyped_storage().nbytes()) == (held is not None)
