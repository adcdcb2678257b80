"""Calls between which a backward lies are not alive together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from remat_runs import Classifier, run, seeded
from torch import Tensor, nn

from lightning_remat import Rematerialization
from lightning_remat.regions.calls import View
from lightning_remat.regions.look_through import look_through
from lightning_remat.regions.phases import Backwards, Span, alive_together, order_of

X, LARGER = torch.randn(4, 6), torch.randn(8, 6)


@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        ([(0, "net", X), (0, "net", X)], {0}),
        ([(0, "net", X), (1, "net", X), (2, "net", X)], {2}),
        ([(0, "net", LARGER), (1, "net", X)], {0}),
        ([(0, "net", X), (0, "head", X), (1, "net", X)], {0}),
        ([(0, "net", X), (0, "net", X), (1, "net", LARGER)], {0, 1}),
        ([(0, "generator", X), (0, "critic", X), (1, "critic", X), (1, "critic", X)], {0, 1}),
    ],
    ids=["one", "alike", "smaller", "part", "fewer-and-larger", "gan"],
)
def test_a_phase_stands_for_those_that_call_no_more_on_no_more(calls: Any, kept: set[int]) -> None:
    assert alive_together((Span(phase, phase), what, (x,), {}) for phase, what, x in calls) == kept


def test_no_phase_stands_for_one_whose_call_waits_for_a_later_backward() -> None:
    calls = [(0, 1, "net"), (1, 1, "net"), (2, 2, "net")]
    assert alive_together((Span(*span), what, (X,), {}) for *span, what in calls) == {0, 1, 2}


@pytest.mark.parametrize(
    ("spans", "order"),
    [
        ([(0, 0), (0, 0)], ()),
        ([(3, 3), (3, 3)], ()),
        ([(0, 0), (1, 1), (1, 1)], (0, ~0, 1, 2, ~2, ~1)),
        ([(0, 1), (0, 0), (1, 1)], (0, 1, ~1, 2, ~2, ~0)),
        ([(0, 2), (2, 2)], (0, 1, ~1, ~0)),
    ],
    ids=["one", "the-last", "two", "waiting", "none-between"],
)
def test_calls_run_backward_in_the_backward_that_they_wait_for(
    spans: list[tuple[int, int]], order: tuple[int, ...]
) -> None:
    assert order_of([Span(*span) for span in spans]) == order


class Twice(nn.Module):
    """Calls its network twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh())


def times_called(between: Callable[[Tensor, Tensor, Backwards], object]) -> int:
    def step(module: Twice, backwards: Backwards) -> None:
        x = X.clone().requires_grad_()
        between(module.net(x).sum(), x, backwards)
        module.net(x)

    return len(seen(step).calls)


def seen(step: Callable[[Twice, Backwards], None]) -> View:
    module, backwards = Twice(), Backwards()
    return look_through(module, lambda: step(module, backwards), backwards=backwards)


def test_backwards_that_run_and_that_would_run_end_a_phase() -> None:
    assert times_called(lambda loss, x, backwards: None) == 2
    assert times_called(lambda loss, x, backwards: backwards.asked(loss)) == 1
    assert times_called(lambda loss, x, backwards: torch.autograd.grad(loss, x)) == 1
    assert times_called(lambda loss, x, backwards: loss.backward()) == 1


def test_backwards_that_retain_their_graph_do_not() -> None:
    assert times_called(lambda loss, x, backwards: backwards.asked(loss, retain_graph=True)) == 2
    assert times_called(lambda loss, x, backwards: backwards.asked(loss, create_graph=True)) == 2
    assert times_called(lambda loss, x, backwards: torch.autograd.grad(loss, x, create_graph=True)) == 2


def backward(loss: Tensor, backwards: Backwards) -> None:
    loss.backward()


def asked(loss: Tensor, backwards: Backwards) -> None:
    backwards.asked(loss, object(), retain_graph=None)


@pytest.mark.parametrize("run_backward", [backward, asked])
def test_a_call_waits_for_the_backward_that_comes_to_it(run_backward: Callable[[Tensor, Backwards], None]) -> None:
    def step(module: Twice, backwards: Backwards) -> None:
        made = module.net(X)
        run_backward(module.net(made.detach()).sum(), backwards)
        run_backward(module.net(made).sum(), backwards)

    assert seen(step).order == (0, 1, ~1, 2, ~2, ~0)


def test_a_call_that_no_backward_comes_to_is_over_with_its_phase() -> None:
    def step(module: Twice, backwards: Backwards) -> None:
        module.net(X)
        backwards.asked(module.net(LARGER).sum())
        backwards.asked((module.net(X) + module.net(X)).sum())

    assert [(call.span.begun, call.span.until) for call in seen(step).calls] == [(0, 0), (0, 0)]


class Adversarial(Classifier):
    """Two networks by turns: each is trained in a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
        self.critic = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = cast(Any, self.optimizers())
        noise = torch.randn(512, 64)
        with torch.no_grad():
            made = self.generator(noise)
        for optimizer, loss in (
            (second, lambda: self.critic(torch.randn(512, 64)).mean() - self.critic(made).mean()),
            (first, lambda: self.critic(self.generator(noise)).mean()),
        ):
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters()) for net in (self.generator, self.critic)]


class Updating(Classifier):
    """Several updates in a step, as PPO makes."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(4):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*")
@pytest.mark.parametrize(
    ("make", "keys", "order"),
    [
        (Adversarial, ("critic", "critic", "generator", "critic"), (0, 1, ~1, ~0, 2, 3, ~3, ~2)),
        (Updating, ("net",), ()),
    ],
)
def test_calls_between_which_a_backward_lies_are_not_taken_to_be_alive_at_once(
    make: Callable[[], Classifier], keys: tuple[str, ...], order: tuple[int, ...], tmp_path: Path
) -> None:
    callback = Rematerialization("periodic", memory_budget="1GiB", batch_size="keep")
    run(tmp_path, seeded(make), callback, max_steps=2)
    assert callback.result is not None
    step = callback.result.step
    assert (step.keys, step.surroundings.order) == (keys, order)
    assert abs(step.surroundings.correction_bytes) < 0.05 * callback.result.measured_peak_bytes
