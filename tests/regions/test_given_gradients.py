"""Of what a model returns beside its loss no gradient comes, and nothing is told to be there for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_remat import Graph, Node, Schedule, find_batch_size, rematerialize, restore, simulate
from lightning_remat.plans.step_memory import RegionCost, region_peaks
from lightning_remat.reports.result import Result

ROWS, WIDTH, CLASSES = 64, 16, 40
LOGITS_BYTES = 4 * ROWS * CLASSES


class Model(nn.Module):
    """Returns its loss beside its logits, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x))
        return F.cross_entropy(logits, y), logits


class Attended(Model):
    """Remembers what it has made on the way, of which nobody asks a gradient."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.scores = self.head(self.body[:4](x)).softmax(1)
        return super().forward(x, y)


class Balanced(Model):
    """Remembers a loss of its own, which is added to what it returns."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        self.balance = h.square().mean(0)
        logits = self.head(h)
        return F.cross_entropy(logits, y), logits


def found(kind: type[nn.Module], loss_of: Any, budget: str = "100%") -> Result:
    """What is told of a step, and measured."""
    torch.manual_seed(0)
    module = kind()
    batch = torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    arguments: dict[str, Any] = {"planner": "periodic", "memory_budget": budget, "batch_size": "keep"}
    result = find_batch_size(module, batch, lambda b: loss_of(module, *b), optimizer, **arguments)
    restore(module)
    return result


def loss_alone(module: Model, x: Tensor, y: Tensor) -> Tensor:
    return module(x, y)[0]


def of_logits(module: Model, x: Tensor, y: Tensor) -> Tensor:
    loss, logits = module(x, y)
    return loss + 1e-3 * logits.logsumexp(1).mean()


def with_memory(module: Balanced, x: Tensor, y: Tensor) -> Tensor:
    return module(x, y)[0] + module.balance.sum()


def weighted(module: Model, x: Tensor, y: Tensor) -> Tensor:
    loss, logits = module(x, y)
    return (loss * logits.detach()).sum()


def test_what_a_loss_stands_beside_weighs_nothing_in_the_backward() -> None:
    result = found(Model, loss_alone)
    assert result.measured_peak_bytes is not None
    (graph,) = (plan.graph for plan in result.step.plans.values())
    assert [graph.nodes[n].kind for n in graph.outputs] == ["cross_entropy"]
    assert [graph.nodes[n].kind for n in graph.let_go] == ["linear"]
    # It was told as held to its own backward, beside a gradient that does not come.
    assert abs(result.measured_peak_bytes - result.predicted_peak_bytes) < 100  # numbers and their gradients


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["90%", "80%"])
def test_a_planned_step_needs_what_is_predicted(budget: str) -> None:
    result = found(Model, loss_alone, budget)
    assert result.step.num_recomputed
    assert result.measured_peak_bytes is not None
    assert result.measured_peak_bytes <= result.budget_bytes
    assert abs(result.step.surroundings.correction_bytes) < 100
    assert abs(result.measured_peak_bytes - result.predicted_peak_bytes) < 100


class Judged(nn.Module):
    """What the model returns beside its loss is judged by another, through which no gradient comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Model()
        self.critic = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(CLASSES, CLASSES), nn.Tanh())))


def of_critic(module: Judged, x: Tensor, y: Tensor) -> Tensor:
    loss, logits = module.net(x, y)
    return loss + module.critic(logits.detach()).sum()


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["100%", "85%"])
def test_what_another_call_saves_of_it_stays_until_its_backward(budget: str) -> None:
    result = found(Judged, of_critic, budget)
    assert [len(result.step.plans[key].graph.let_go) for key in ("net", "critic")] == [1, 0]
    assert bool(result.step.num_recomputed) == (budget != "100%")
    assert result.measured_peak_bytes is not None
    assert abs(result.measured_peak_bytes - result.predicted_peak_bytes) < 100


@pytest.mark.slow
def test_an_attribute_that_is_set_is_not_taken_for_what_a_gradient_comes_of() -> None:
    result = found(Attended, loss_alone)
    assert result.measured_peak_bytes is not None
    # The module holds it for longer, which nobody has told.
    assert abs(result.measured_peak_bytes - result.predicted_peak_bytes) <= 2 * LOGITS_BYTES
    (graph,) = (plan.graph for plan in result.step.plans.values())
    assert [graph.nodes[n].kind for n in graph.outputs] == ["cross_entropy"]


@pytest.mark.parametrize(("kind", "loss_of"), [(Model, of_logits), (Balanced, with_memory)])
def test_what_is_asked_for_counts(kind: type[Model], loss_of: Any) -> None:
    result = found(kind, loss_of)
    (graph,) = (plan.graph for plan in result.step.plans.values())
    assert not graph.let_go
    assert result.measured_peak_bytes is not None
    assert result.measured_peak_bytes <= result.predicted_peak_bytes + 3 * LOGITS_BYTES  # of the code between


def test_what_the_code_between_saves_stays() -> None:
    result = found(Model, weighted)
    (graph,) = (plan.graph for plan in result.step.plans.values())
    assert not graph.let_go


@pytest.mark.slow
def test_a_module_by_itself_may_be_asked_for_all_that_it_returns() -> None:
    torch.manual_seed(0)
    made = rematerialize(Model(), torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,)), memory_budget="80%")
    assert not made.graph.let_go


GRAPH = Graph(
    (
        Node("body", output_bytes=10, gradient_bytes=10),
        Node("logits", inputs=(0,), saved=(0,), output_bytes=100, gradient_bytes=100),
        Node("loss", inputs=(1,), output_bytes=4, tape_bytes=100, gradient_bytes=4),
        Node("indices", inputs=(1,), output_bytes=7, gradient_bytes=0),
        Node("states", inputs=(0,), output_bytes=20, gradient_bytes=20, num_outputs=2),
    ),
    outputs=(1, 2, 3, 4),
)


def test_a_graph_is_asked_for_gradients_by_their_sizes() -> None:
    assert GRAPH.asked_for(None) is GRAPH
    asked = GRAPH.asked_for({4})
    # What has no gradient is held as before, and so are several tensors in one, of which single ones may be asked for.
    assert (asked.outputs, asked.let_go) == ((2, 3, 4), (1,))
    assert asked.ends() == (2, 4)
    assert Graph.from_json(asked.to_json()) == asked
    assert GRAPH.asked_for({4, 100}).outputs == GRAPH.outputs
    assert GRAPH.asked_as(asked) == asked
    assert GRAPH.asked_as(Graph(GRAPH.nodes[:3], outputs=(2,), let_go=(1,))) is GRAPH
    assert asked.holding_all.outputs == GRAPH.outputs
    assert asked.holding_all.ends() == asked.ends()


def test_what_is_let_go_lives_to_the_end_of_the_forward() -> None:
    graph = Graph(GRAPH.nodes[:3], outputs=(1, 2)).asked_for({4})
    schedule = Schedule.parse("F0 F1 F2 D1 B2 T2 D2 B1 D0 B0")
    assert simulate(graph, schedule).memory_bytes[:4] == (10, 110, 214, 214)
    early = Schedule.parse("F0 F1 F2 D1 D2 B2 T2 B1 D0 B0")
    held, freed = (simulate(graph, early, holds_let_go=holds).memory_bytes for holds in (True, False))
    assert held[4] == freed[4] + 100
    assert held[5:] == freed[5:]
    peaks = region_peaks(RegionCost("net", graph, schedule), is_accumulating=False)
    assert (peaks.forward_bytes, peaks.held_bytes) == (214, 114)  # held: of the loss and before it


def test_what_is_let_go_must_be_there() -> None:
    with pytest.raises(ValueError, match="let_go holds node 5, but the graph has 1 nodes"):
        Graph((Node("body"),), let_go=(5,))
