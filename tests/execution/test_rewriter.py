import copy
import inspect
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from training_steps import assert_equal_traces, step_peak, traces

from benchmarks.peaks import LOSS_BYTES
from lightning_remat import InfeasibleBudgetError, Plan, TraceError, rematerialize, restore
from lightning_remat.execution.rewriter import current_plan, programs_in


def network() -> nn.Sequential:
    """Eight blocks whose activations outweigh their parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Sigmoid()) for _ in range(8)))


X = torch.randn(512, 16)


def rewritten() -> nn.Sequential:
    module = network()
    rematerialize(module, X, memory_budget="60%", planner="periodic")
    return module


def is_rewritten(module: nn.Module) -> bool:
    return "forward" in vars(module)


@pytest.mark.slow
def test_restore_undoes_and_repeats() -> None:
    module = network()
    before = set(vars(module))
    keys = list(module.state_dict())
    rematerialize(module, X, memory_budget="60%", planner="periodic")
    assert is_rewritten(module)
    assert list(module.state_dict()) == keys
    rematerialize(module, X, memory_budget="70%", planner="periodic")
    for _ in range(2):
        restore(module)
        assert set(vars(module)) == before


@pytest.mark.slow
def test_a_plan_that_recomputes_nothing_leaves_the_plain_forward() -> None:
    module = network()
    plan = rematerialize(module, X, memory_budget="100%", planner="periodic")
    assert plan.num_recomputed == 0
    assert not is_rewritten(module)


@pytest.mark.slow
def test_eval_and_no_grad_use_the_plain_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    module = rewritten()
    monkeypatch.setattr("lightning_remat.execution.rewriter.run_forward", lambda *_: pytest.fail("the executor ran"))
    with torch.no_grad():
        module(X)
    module.eval()(X)


@pytest.mark.slow
def test_copies_are_rewritten_and_pickles_are_plain() -> None:
    module = rewritten()
    twin = copy.deepcopy(module)
    assert is_rewritten(twin)
    assert twin.forward.__self__ is twin
    assert torch.equal(twin(X), module(X))
    assert current_plan(twin) is current_plan(module)
    loaded = pickle.loads(pickle.dumps(module))
    assert current_plan(loaded) is None
    assert torch.equal(loaded(X), module(X))


@pytest.mark.slow
def test_a_stored_plan_is_taken() -> None:
    module = network()
    made = rematerialize(module, X, memory_budget="60%", planner="periodic")
    stored = Plan.from_json(made.to_json())
    assert stored.schedule == made.schedule
    assert stored.peak_bytes == made.peak_bytes
    other = network()
    assert rematerialize(other, X, plan=stored).schedule == made.schedule
    with pytest.raises(ValueError, match=r"was made for 10\.56 KiB of parameters and buffers and Sequential has 1\.06"):
        rematerialize(nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()), X, plan=stored)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"memory_budget": 10, "planner": "periodic"}, InfeasibleBudgetError, "cannot go below"),
        ({"memory_budget": "60%", "planner": "magic"}, ValueError, "unknown planner 'magic'.*periodic"),
        ({"memory_budget": "sixty"}, ValueError, "memory_budget is 'sixty'"),
    ],
)
def test_errors_leave_the_module_as_it_was(arguments: dict, error: type[Exception], message: str) -> None:
    for module in (network(), rewritten()):
        state, attributes = copy.deepcopy(module.state_dict()), dict(vars(module))
        random_state = torch.get_rng_state()
        with pytest.raises(error, match=message):
            rematerialize(module, X, **arguments)
        assert vars(module) == attributes or is_rewritten(module)
        assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), state.values(), strict=True))
        assert torch.equal(torch.get_rng_state(), random_state)
        assert all(p.grad is None for p in module.parameters())


@pytest.mark.slow
def test_infeasible_budgets_carry_the_floor() -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        rematerialize(network(), X, memory_budget=10, planner="periodic")
    floor = int(caught.value.minimum_bytes)
    assert caught.value.node is not None
    assert rematerialize(network(), X, memory_budget=floor, planner="periodic").peak_bytes == floor
    with pytest.raises(InfeasibleBudgetError):
        rematerialize(network(), X, memory_budget=floor - 1, planner="periodic")


class BranchesOnValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x.sigmoid()
        return x.tanh()


def test_what_cannot_be_traced_names_line_and_remedy() -> None:
    with pytest.raises(TraceError, match=r"Remedy") as caught:
        rematerialize(BranchesOnValues(), X, memory_budget="50%", planner="periodic")
    assert caught.value.where is not None
    assert "test_rewriter.py" in caught.value.where


class Block(nn.Module):
    """A branch between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16), nn.Tanh())
        self.branch, self.last = BranchesOnValues(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.branch(self.first(x))).sigmoid()


@pytest.mark.slow
def test_a_branch_on_values_divides_the_forward_into_graphs() -> None:
    module = nn.Sequential(Block(), Block())
    plain = copy.deepcopy(module)
    with pytest.raises(InfeasibleBudgetError) as caught:
        rematerialize(module, X, memory_budget=10)
    plan = rematerialize(module, X, memory_budget=int(caught.value.minimum_bytes))
    assert plan.rung == "regions"
    assert plan.num_recomputed
    assert any("Data-dependent branching" in reason for reason in plan.reasons)
    assert_equal_traces(traces(plain, [X, X + 1, X - 9]), traces(module, [X, X + 1, X - 9]))


@pytest.mark.slow
def test_what_changes_is_captured_anew() -> None:
    module, plain = rewritten(), network()
    for m in (module, plain):
        m[1][1].eval()
    assert_equal_traces(traces(plain, [X, X[:100]]), traces(module, [X, X[:100]]))


@pytest.mark.slow
def test_sizes_may_change_between_steps() -> None:
    plain, ours = network(), rewritten()
    for size in (512, 7, 64):
        results = []
        for module in (plain, ours):
            module.zero_grad()
            module(X[:size]).square().sum().backward()
            results.append([p.grad.clone() for p in module.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_forward_replaced_by_others_is_refused() -> None:
    module = network()
    replacement = module.forward
    module.forward = replacement
    with pytest.raises(ValueError, match=r"has been replaced on this instance, by torch\.nn\.\S*Sequential\.forward, "):
        rematerialize(module, X, memory_budget="60%", planner="periodic")
    assert vars(module)["forward"] is replacement


@pytest.mark.slow
def test_a_rewritten_forward_says_of_itself_what_the_plain_one_says() -> None:
    plain, ours = network().forward, rewritten().forward
    assert inspect.signature(ours) == inspect.signature(plain)
    assert (ours.__name__, ours.__doc__) == (plain.__name__, plain.__doc__)


@pytest.mark.slow
def test_eval_mode_warns() -> None:
    with pytest.warns(UserWarning, match="eval mode"):
        rematerialize(network().eval(), X, memory_budget="100%", planner="periodic")


class RemembersPositions(nn.Module):
    """Its first forward makes what all later ones read, which is then alive from their beginning to their end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(8)))
        self.positions: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None:
            self.positions = torch.linspace(0, 1, x.numel()).reshape_as(x)
        return self.layers(x + self.positions)


@pytest.mark.slow
def test_what_is_remembered_by_the_first_step_leaves_the_later_ones_within_the_budget() -> None:
    module, x = RemembersPositions(), torch.randn(256, 64)
    with pytest.raises(InfeasibleBudgetError) as caught:
        rematerialize(module, x, memory_budget=1, planner="periodic")
    budget = int(caught.value.minimum_bytes)
    rematerialize(module, x, memory_budget=budget, planner="periodic")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # in the second it is planned anew, on fake tensors, which the meter would count
            module(x).sum().backward()
        assert isinstance(module.positions, Tensor)
        assert step_peak(module, x) - LOSS_BYTES <= budget


class OfAnyDepth(nn.Module):
    """Runs as many blocks as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()) for _ in range(12)))

    def forward(self, x: Tensor, depth: int) -> Tensor:
        return self.blocks[:depth](x)


@pytest.mark.slow
def test_graphs_that_fit_as_they_are_need_no_plans_and_leave_those_to_others() -> None:
    module = OfAnyDepth()
    rematerialize(module, X, 12, memory_budget="75%", planner="periodic")
    for depth in range(1, 11):
        module(X[:4], depth).sum().backward()
    assert len(programs_in(module)) == 1
    module(X, 11).sum().backward()
    assert len(programs_in(module)) == 2


@pytest.mark.slow
def test_a_graph_that_fits_a_small_input_as_it_is_is_planned_once_it_gets_a_large_one() -> None:
    module = OfAnyDepth()
    rematerialize(module, X, 12, memory_budget="75%", planner="periodic")
    for size in (4, 8):  # the second has a graph for all sizes
        module(X[:size], 11).sum().backward()
    assert len(programs_in(module)) == 1
    module(X, 11).sum().backward()
    assert len(programs_in(module)) == 2


class WithALateLayer(nn.Module):
    """Its forward begins to call what was rewritten by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.late, self.calls = network(), network(), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(x)
        return self.late(h) if self.calls else h


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_a_graph_that_begins_to_call_a_rewritten_module_holds_what_that_computes() -> None:
    plain = WithALateLayer()
    ours = copy.deepcopy(plain)
    for module in (ours, ours.late):
        assert rematerialize(module, X, memory_budget="60%", planner="periodic").num_recomputed
    assert len(programs_in(ours)) == 2
    assert_equal_traces(traces(plain, [X, X + 1]), traces(ours, [X, X + 1]))
    plain.calls = ours.calls = True
    expected = traces(plain, [X, X + 1])
    with pytest.warns(UserWarning, match="WithALateLayer does something new and may need more"):  # twice as many layers
        assert_equal_traces(expected, traces(ours, [X, X + 1]))
    assert len(programs_in(ours)) == 3


class Doubling(nn.Sequential):
    """What a module may be made after it was planned."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_class_that_is_exchanged_runs_by_its_own_forward() -> None:
    module, x = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))), torch.randn(64, 8)
    assert rematerialize(module, x, memory_budget="90%", planner="periodic").num_recomputed
    once = module(x)
    module.__class__ = Doubling
    with pytest.warns(UserWarning, match="its class has another forward now"):
        assert torch.equal(module(x), 2 * once)
