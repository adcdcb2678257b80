"""Modules whose forward is no single graph: its graphs, or its parts, are rematerialized under one budget."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_steps import assert_equal_traces, step_peak, traces

from lightning_remat import InfeasibleBudgetError, Plan, TraceError, rematerialize, restore, simulate
from lightning_remat.execution.rewriter import current_plan


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        y = self.dropout(self.back(functional.gelu(self.wide(self.norm(x))))) * scale
        return x + y if mask is None else x + y * mask


class Network(nn.Module):
    """Branches on values between its blocks, and makes its loss itself."""

    def __init__(self, width: int = 16, depth: int = 6) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.stem(x))
        if x.abs().sum() > 0:  # its sum is zero but for rounding, which differs from process to process
            x = x * 1.5
        mask = torch.ones_like(x[:, :1])
        for block in self.blocks:
            x = block(x, scale=0.7, mask=mask)
        return functional.cross_entropy(self.head(x), x.detach().argmax(1) % 5), x


class Aside(Network):
    """Nothing of its own forward can be captured; its blocks can."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


class Nested(nn.Module):
    """The blocks lie two levels below, under another forward that branches on values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Network(), nn.Sequential(nn.Linear(16, 64), nn.Sigmoid(), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> Any:
        loss, y = self.inner(x)
        return loss if loss > 1e9 else loss + self.last(y).square().mean()


class Twice(nn.Module):
    """The same block runs at three places."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x) if x.sum() > -1e9 else x
        return x


class Looks(nn.Module):
    """Logs a value between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            self.seen = x.mean().item()
        return x


X = torch.randn(256, 16)


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "parts", "planner"),
    [
        (Network, ["[0]", "[1]"], "periodic"),
        pytest.param(Network, ["[0]", "[1]"], "auto", marks=pytest.mark.slow),
        pytest.param(Aside, [f"blocks.{i}" for i in range(6)], "periodic", marks=pytest.mark.slow),
        (Nested, ["[0]", "[1]", "[2]"], "periodic"),
        (Twice, ["[0]", "[1]"], "periodic"),
        (Looks, ["[0]", "[1]"], "periodic"),
    ],
)
@pytest.mark.slow
def test_parts_share_the_budget_and_results_are_the_plain_ones(
    kind: type[nn.Module], parts: list[str], planner: str
) -> None:
    plain = build(kind)
    ours = copy.deepcopy(plain)
    random_state = torch.get_rng_state()
    plan = rematerialize(ours, X, memory_budget="70%", planner=planner)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True))
    assert (plan.rung, plan.planner) == ("regions", planner)
    assert f"{kind.__name__}.forward cannot be captured as one graph" in plan.reasons[0]
    assert (kind is Aside) or "test_region_rewriter.py" in plan.reasons[0]  # where it breaks
    assert "\n" not in plan.reasons[0]
    assert plan.step is not None
    assert list(plan.step.plans) == parts
    assert plan.num_recomputed > 0
    assert plan.plain.peak_bytes == pytest.approx(step_peak(plain, X), rel=0.02)
    assert plan.peak_bytes == pytest.approx(step_peak(ours, X), rel=0.001)
    assert step_peak(ours, X) <= plan.budget_bytes == int(0.7 * plan.plain.peak_bytes)
    assert len(simulate(plan.graph, plan.schedule).memory_bytes) == len(plan.simulation.memory_bytes)
    plain.load_state_dict(ours.state_dict())
    assert_equal_traces(traces(plain, [X, X[:100]]), traces(ours, [X, X[:100]]))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "part"), [(Network, ""), (Aside, "blocks.0")])
def test_restore_undoes_the_parts_and_a_failure_brings_them_back(kind: type[nn.Module], part: str) -> None:
    module = build(kind)
    attributes = {name: dict(vars(m)) for name, m in module.named_modules()}
    plan = rematerialize(module, X, memory_budget="70%", planner="periodic")
    assert current_plan(module) is plan
    with pytest.raises(ValueError, match="unknown planner"):
        rematerialize(module, X, memory_budget="70%", planner="magic")
    assert current_plan(module) is plan
    assert "forward" in vars(module.get_submodule(part))
    restore(module)
    assert {name: dict(vars(m)) for name, m in module.named_modules()} == attributes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Network, r"of parameters and buffers and Network has"),
        (Aside, r"for a module with a part 'blocks\.4', which Aside has not"),
    ],
)
def test_a_stored_plan_is_taken(kind: type[Network], told: str) -> None:
    made = rematerialize(build(kind), X, memory_budget="70%", planner="periodic")
    stored = Plan.from_json(made.to_json())
    assert (stored.peak_bytes, stored.plain.peak_bytes) == (made.peak_bytes, made.plain.peak_bytes)
    assert (stored.schedule, stored.rung, stored.reasons) == (made.schedule, "regions", made.reasons)
    other = build(kind)
    assert rematerialize(other, X, plan=stored) is stored
    assert step_peak(other, X) <= made.budget_bytes
    with pytest.raises(ValueError, match=told):
        rematerialize(kind(depth=4), X, plan=stored)


@pytest.mark.slow
def test_too_small_a_budget_names_the_lowest_peak_of_the_whole_step() -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"by its plan for the lowest peak was measured to need") as caught:
        rematerialize(build(Network), X, memory_budget=1000, planner="periodic")
    assert re.search(r"the peak is set by '\[1\]\.blocks", str(caught.value))
    module = build(Network)
    plan = rematerialize(module, X, memory_budget=int(caught.value.minimum_bytes), planner="periodic")
    assert step_peak(module, X) <= plan.budget_bytes == caught.value.minimum_bytes
    share = re.search(r"\(([\d.]+%) of the plain step's peak\)", str(caught.value))
    assert share is not None
    assert rematerialize(module, X, memory_budget=share[1], planner="periodic").peak_bytes == plan.peak_bytes


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sigmoid()


def test_where_no_part_can_be_captured_the_module_is_untouched() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Bare(), Bare()

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) if x.mean() > 9 else self.second(x)

    pair = Pair()
    attributes = {name: dict(vars(m)) for name, m in pair.named_modules()}
    with pytest.raises(
        TraceError, match=r"Pair.forward cannot be captured.*Remedy.*\n  second: Bare.forward"
    ) as caught:
        rematerialize(pair, X, memory_budget="70%")
    assert caught.value.where is not None
    assert "test_region_rewriter.py" in caught.value.where
    assert {name: dict(vars(m)) for name, m in pair.named_modules()} == attributes


@pytest.mark.slow
def test_the_log_tells_the_rung_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_remat"):
        rematerialize(build(Network), X, memory_budget="70%", planner="periodic")
    (record,) = caplog.records
    assert record.name == "lightning_remat"
    assert "its parts are rematerialized one by one under one budget: [0], [1])" in record.message
    assert "Data-dependent branching" in record.message
    caplog.clear()
    with caplog.at_level(logging.INFO, "lightning_remat"):
        rematerialize(build(Aside), X, memory_budget="70%", planner="periodic")
    (record,) = [r for r in caplog.records if r.name == "lightning_remat"]
    assert "one by one under one budget: blocks.0, blocks.1, " in record.message
    assert "Aside.forward cannot be captured as one graph" in record.message


class WritesItsInput(nn.Module):
    """Its second graph writes into what the first has made, which no recomputation may do."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True)) for _ in range(4)]
        self.first, self.last = nn.Sequential(*blocks, nn.Linear(16, 16)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        h[:, 0] = self.last(x)[:, 0]
        return h.sum()


@pytest.mark.slow
def test_a_part_that_stays_as_it_is_has_no_activations_to_put_apart_and_is_not_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, x = WritesItsInput(), torch.randn(256, 16)
    with pytest.raises(InfeasibleBudgetError) as caught:
        rematerialize(module, x, memory_budget=1)
    with caplog.at_level("INFO", "lightning_remat"):
        made = rematerialize(module, x, memory_budget=caught.value.minimum_bytes)
        module(x).backward()
    assert made.peak_bytes <= caught.value.minimum_bytes
    assert any(reason.startswith("[1]: ") for reason in made.reasons)  # told once; a warning would fail this test
    assert "something new" not in caplog.text


class Cropped(nn.Module):
    """Behind a break, it is another constant at every step of which part of the input it makes use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.rest = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())))

    def forward(self, x: Tensor) -> Tensor:
        length = int(x.shape[1] * (1 - np.random.uniform(0.4, 0.8)))  # noqa: NPY002
        return self.rest(self.first(x)[:, :length])


@pytest.mark.slow
def test_what_runs_plain_behind_a_break_after_sixteen_captures_is_told() -> None:
    module, x = Cropped(), torch.randn(8, 64, 64)
    assert rematerialize(module, x, memory_budget="70%", planner="periodic").rung == "regions"
    with pytest.warns(UserWarning, match=r"^forward runs without rematerialization from .*\.py:\d+ on .* 16 times"):
        [module(x).sum().backward() for _ in range(24)]


class Looping(nn.Module):
    """Calls the blocks of a container one by one, in a loop that cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Dropout(0.1), nn.Tanh()) for _ in range(6)]
        self.deep = nn.ModuleDict({"inner": nn.Sequential(*blocks)})
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in cast(nn.Sequential, self.deep["inner"]):
            h = block(h)
            print(end="")
        return self.last(h)


@pytest.mark.slow
def test_blocks_that_a_loop_calls_are_found_below_their_container() -> None:
    plain, x = Looping(), torch.randn(256, 16)
    ours = copy.deepcopy(plain)
    plan = rematerialize(ours, x, memory_budget="85%", planner="periodic")
    assert plan.num_recomputed
    assert plan.step is not None
    assert plan.step.keys == tuple(f"deep.inner.{k}" for k in range(6))
    assert_equal_traces(traces(plain, [x] * 3), traces(ours, [x] * 3))


class Queue(nn.Module):
    """Contrasts with a copy of what it writes behind a break, as momentum contrast does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))
        self.register_buffer("queue", torch.randn(16, 128))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        keys = self.net(x)
        logits = keys @ self.queue.clone().detach()
        at = int(self.at)
        self.queue[:, at : at + len(x)] = keys.detach().T
        self.at[0] = (at + len(x)) % 128
        return logits.square().mean()


@pytest.mark.slow
def test_a_copy_of_what_a_later_graph_writes_is_computed_again_from_what_was_there() -> None:
    plain = build(Queue)
    ours = copy.deepcopy(plain)
    x = torch.randn(64, 32)
    plan = rematerialize(ours, x, memory_budget="95%")
    assert (plan.rung, bool(plan.num_recomputed)) == ("regions", True)
    assert_equal_traces(traces(plain, [x] * 3), traces(ours, [x] * 3))
    assert torch.equal(plain.get_buffer("queue"), ours.get_buffer("queue"))
