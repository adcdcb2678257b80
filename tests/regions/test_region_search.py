"""Training steps whose modules are no single graph: the graphs inside are rematerialized, or nothing is."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from remat_runs import Classifier, network, run, seeded
from same_runs import WIDTH, Manual, assert_same_run, deep, remat
from torch import Tensor, nn
from torch.nn import functional

from lightning_remat import Rematerialization, TraceError, find_batch_size, rematerialize, restore
from lightning_remat.regions.chosen_modules import submodules

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


class Branches(nn.Module):
    """Decides on values, before parts of which one is aside."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = network()[:-1], Chooses()

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return self.head(y if y.sum() > -1e9 else -y)


class Chooses(nn.Module):
    """Nothing of it can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 16))

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight if x.mean() > -1e9 else -self.weight)


class Wraps(nn.Module):
    """Its forward is no single graph and only hands on, under autocast."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.inner(x)
        assert bool(torch.isfinite(y).all())
        return y.float()


def rewritten(module: nn.Module) -> list[str]:
    return [name for name, m in submodules(module) if "forward" in vars(m)]


@pytest.mark.slow
def test_the_trainer_s_step_is_searched_and_trains_as_plainly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained: list[Classifier] = []
    callback = Rematerialization("periodic", memory_budget="80%", batch_size="keep")

    class Ends(Classifier):
        def on_train_end(self) -> None:
            self.rewritten = rewritten(self)

    for callbacks in ([], [callback]):
        module = seeded(Ends, net=seeded(Branches))
        with caplog.at_level(logging.INFO, "lightning_remat"):
            run(tmp_path, module, *callbacks, max_steps=3)
        trained.append(module)
    assert callback.result is not None
    assert callback.result.step.num_recomputed > 0
    assert [m.rewritten for m in trained] == [[], ["net"]]
    assert callback.result.measured_peak_bytes is not None
    assert callback.result.measured_peak_bytes <= callback.result.budget_bytes
    assert list(callback.result.step.plans) == ["net[0]"]
    assert "net: Branches.forward cannot be captured as one graph: Data-dependent branching" in caplog.text
    plain, ours = (module.state_dict() for module in trained)
    assert all(torch.equal(plain[key], ours[key]) for key in plain)


@pytest.mark.slow
def test_a_size_is_found_for_the_parts(tmp_path: Path) -> None:
    module = seeded(Classifier, net=Branches())
    callback = Rematerialization("periodic", memory_budget="3MiB", max_batch_size=16)
    run(tmp_path, module, callback, max_steps=2)
    assert callback.result is not None
    assert callback.result.batch_size > 1
    assert callback.result.measured_peak_bytes is not None
    assert callback.result.measured_peak_bytes <= callback.result.budget_bytes
    assert abs(callback.result.prediction_error or 0) < 0.01


def test_a_step_of_which_nothing_can_be_captured_is_left_alone(tmp_path: Path) -> None:
    class Bare(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return functional.cross_entropy(self.net(batch[0].mean((2, 3)).repeat(1, 6)[:, :16]), batch[1])

    callback = Rematerialization("periodic", memory_budget="80%", batch_size="keep")
    message = (
        r"leaves the model as it is: nothing that the training step calls.*\n  net: Chooses\.forward cannot be captured"
    )
    with pytest.warns(UserWarning, match=message):
        run(tmp_path, seeded(Bare, net=Chooses()), callback, max_steps=1)
    assert callback.result is None
    with pytest.raises(TraceError, match="nothing that the training step calls"):
        run(tmp_path, seeded(Bare, net=Chooses()), Rematerialization(memory_budget="80%"), max_steps=1)


@pytest.mark.slow
def test_a_wrapper_s_module_is_profiled_as_the_wrapper_calls_it() -> None:
    torch.manual_seed(0)
    plain = Wraps(network())
    x, y = torch.randn(8, 3, 16, 16), torch.randint(0, 5, (8,))
    ours = copy.deepcopy(plain)
    plan = rematerialize(ours, x, memory_budget="80%", planner="periodic")
    assert list(plan.step.plans if plan.step is not None else ()) == ["[0]"]
    assert plan.num_recomputed > 0
    gradients = []
    for module in (plain, ours):
        torch.manual_seed(1)
        functional.cross_entropy(module(x), y).backward()
        gradients.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    # Half precision under autocast: less than a plan without it would count.
    uncast = rematerialize(copy.deepcopy(plain.inner), x, memory_budget="100%", planner="periodic")
    assert plan.plain.peak_bytes < 0.8 * uncast.plain.peak_bytes
    restore(ours)


@pytest.mark.slow
def test_a_data_parallel_wrapper_is_looked_into() -> None:
    module = Wraps(nn.DataParallel(network()))
    x, y = torch.randn(8, 3, 16, 16), torch.randint(0, 5, (8,))
    result = find_batch_size(
        module,
        (x, y),
        lambda batch: functional.cross_entropy(module(batch[0]), batch[1]),
        planner="periodic",
        memory_budget="80%",
        batch_size="keep",
    )
    assert result.step.num_recomputed > 0
    assert list(result.step.plans) == ["[0]", "[1]"]  # before and after the check on values
    assert rewritten(module) == [""]


class PartlyScripted(nn.Module):
    """A part of it is no Python any more."""

    def __init__(self, compiled: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.body, middle, self.head = (
            nn.Sequential(*(f for _ in range(4) for f in (nn.Linear(16, 16), nn.Sigmoid()))) for _ in range(3)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, and still in use
            self.middle = compiled(middle)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.body(x)))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 16))])
def test_what_torch_jit_has_compiled_stays_as_it_is(compiled: Any) -> None:
    plain = PartlyScripted(compiled)
    ours = PartlyScripted(compiled)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(64, 16)
    plan = rematerialize(ours, x, memory_budget="85%")
    assert plan.num_recomputed
    for _ in range(2):
        for module in (plain, ours):
            module.zero_grad()
            module(x).square().sum().backward()
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


class HandsOn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.slow
def test_a_part_that_hands_on_its_input_is_no_region() -> None:
    layers = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
    module, x = nn.Sequential(Chooses(), nn.Linear(5, 16), *layers, HandsOn()), torch.randn(256, 16)
    plan = rematerialize(module, x, memory_budget="100%")
    assert plan.step is not None
    with pytest.raises(TraceError, match="Nor can its submodules"):
        rematerialize(nn.Sequential(Chooses(), HandsOn()), x, memory_budget="100%")


class DecidesTwice(nn.Module):
    """Two graphs, the second of which is another one in each part of a step: a later look sees both parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = deep(depth=3), deep(depth=3)

    def forward(self, x: Tensor, k: int) -> Tensor:
        h = self.first(x)
        if h.sum() < -1e9:
            h = -h
        return self.second(h.sigmoid() if k else h)


class Remembers(Manual):
    """Its recurrent part is called without a state in the first part of a step, and with one in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = DecidesTwice()
        self.recurrent = nn.GRU(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        state = None
        for k in range(2):
            out, state = self.recurrent(self.net(batch[0], k)[None], state)
            self.manual_backward(out.square().mean())
            state = state.detach()
        optimizer.step()


@pytest.mark.slow
def test_a_part_that_turns_out_to_be_called_in_two_ways_is_planned_in_each(tmp_path: Path) -> None:
    result = assert_same_run(tmp_path, Remembers, callback=remat(memory_budget="90%")).result
    assert result is not None
    assert {"recurrent[0]", "recurrent[1]"} <= {*result.step.keys}
