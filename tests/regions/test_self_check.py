"""A plan that does not repeat the plain step is found out, and the first operation to blame is named."""

from __future__ import annotations

import copy
import itertools
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from training_steps import assert_equal_traces, traces

from lightning_remat import Graph, Schedule, is_recomputing, rematerialize
from lightning_remat.lowering import lower_kept
from lightning_remat.regions.self_check import Compared, compared, find_difference, fingerprint
from lightning_remat.regions.step_run import step_outcome

CALLS = {"count": 0}


@torch.library.custom_op("lightning_remat_tests::hidden", mutates_args=())
def hidden(x: Tensor) -> Tensor:
    """Its result depends on a count that is kept where nobody looks."""
    CALLS["count"] += 1
    return x + CALLS["count"] % 7


@torch.library.custom_op("lightning_remat_tests::recomputed", mutates_args=())
def recomputed(x: Tensor) -> Tensor:
    """Only a recomputation goes wrong."""
    return x * 1.5 if is_recomputing() else x.clone()


for op in (hidden, recomputed):
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, gradient: gradient)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return hidden(self.linear(x).sigmoid())


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return recomputed(self.linear(x).sigmoid())


class BranchingRoot(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if input.sum() > -1e9 else -input)


X = torch.randn(512, 16)


def keep_but_ends(graph: Graph, budget_bytes: int) -> Schedule:
    """A planner that recomputes the last two operations of each block."""
    names = [node.name for node in graph.nodes]
    ends = {n for n, name in enumerate(names[:-1]) if name.endswith((".recomputed", ".5"))}
    return lower_kept(graph, set(range(len(names))) - ends)


def network(part: type[nn.Module], root: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.Tanh(), nn.Linear(64, 16)) for _ in range(6)]
    for block in blocks:
        block.append(part())
        block.append(nn.Sigmoid())
    return root(*blocks)


@pytest.mark.slow
@pytest.mark.parametrize("root", [nn.Sequential, BranchingRoot])
def test_a_right_plan_passes_and_leaves_no_trace(root: type[nn.Sequential]) -> None:
    plain = network(nn.Tanh, root)
    ours = copy.deepcopy(plain)
    state, random_state = copy.deepcopy(ours.state_dict()), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = rematerialize(ours, X, memory_budget="80%", planner="periodic", self_check=True)
    assert plan.num_recomputed > 0
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), ours.state_dict().values(), strict=True))
    assert all(p.grad is None for p in ours.parameters())
    assert_equal_traces(traces(plain, [X]), traces(ours, [X]))


@pytest.mark.slow
@pytest.mark.parametrize("root", [nn.Sequential, BranchingRoot])
def test_a_recomputation_that_differs_is_named_and_the_plain_model_kept(root: type[nn.Sequential]) -> None:
    module = network(Recomputed, root)
    attributes = {name: dict(vars(m)) for name, m in module.named_modules()}
    with pytest.warns(UserWarning, match="is left as it is: a planned step differs") as caught:
        plan = rematerialize(module, X, memory_budget="99%", planner=keep_but_ends, self_check=True)
    message = str(caught[0].message)
    assert "in its gradient of " in message
    assert re.search(r"first differing node '.*recomputed': its recomputation makes something else", message)
    assert (plan.num_recomputed, plan.planner, plan.peak_bytes) == (0, "keep_all", plan.plain.peak_bytes)
    assert plan.reasons[-1] == message
    assert {name: dict(vars(m)) for name, m in module.named_modules()} == attributes


@pytest.mark.slow
def test_hidden_state_is_found() -> None:
    with pytest.warns(UserWarning, match="is left as it is: a planned step differs"):
        rematerialize(network(Hidden), X, memory_budget="80%", planner="periodic", self_check=True)


@pytest.mark.slow
def test_a_wrong_executor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_remat.execution import resting_storages
    from lightning_remat.execution.executor import Execution

    def give_wrong(storage: torch.UntypedStorage, to: torch.UntypedStorage) -> None:
        give_memory(storage, to)
        torch.empty(0).set_(to).mul_(factor[0])

    give_memory, factor = resting_storages.give_memory, [1.0]
    monkeypatch.setattr(resting_storages, "give_memory", give_wrong)  # before it is in compiled functions
    module = network(nn.Tanh)
    rematerialize(module, X, memory_budget="80%", planner="periodic")
    assert find_difference(module, lambda: step_outcome(module, (X,), {})) is None
    unpack = Execution.unpack  # where nothing rests there are hooks
    factor[0] = 1.001
    monkeypatch.setattr(Execution, "unpack", lambda self, reference: unpack(self, reference) * factor[0])
    difference = find_difference(module, lambda: step_outcome(module, (X,), {}))
    assert difference is not None
    assert difference.what.startswith("gradient of ")


@pytest.mark.slow
def test_an_error_of_the_planned_step_alone_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_remat.execution import executor

    module = network(nn.Tanh)
    rematerialize(module, X, memory_budget="80%", planner="periodic")

    def fails(*_: object, **_options: object) -> None:
        raise RuntimeError("lost its way")

    monkeypatch.setattr(executor.Execution, "_follow", fails)
    difference = find_difference(module, lambda: step_outcome(module, (X,), {}))
    assert difference is not None
    assert difference.what == "course: RuntimeError: lost its way"


class Ranks:
    """Two processes that agree, each a thread."""

    def __init__(self) -> None:
        self.barrier, self.values = threading.Barrier(2, timeout=60), [0, 0]

    def agree(self, rank: int, value: int) -> int:
        self.values[rank] = value
        self.barrier.wait()
        least = min(self.values)
        self.barrier.wait()
        return least


@pytest.fixture(scope="module")
def rewritten() -> list[nn.Sequential]:
    modules = [nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))) for _ in range(2)]
    for module in modules:
        rematerialize(module, X, memory_budget="90%", planner="periodic")
    return modules


Steps = Callable[[], object]
"""What comes of one step after the other; an error is raised."""


def always(what: object) -> Steps:
    return lambda: what


def numbered() -> Steps:
    return itertools.count().__next__


NO_MEMORY, FAILURE = torch.OutOfMemoryError("out of memory"), RuntimeError("lost its way")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planned", "plain", "by_plan", "differs", "different"),
    [
        ([1, 1], [1, 1], True, False, [None, None]),
        ([2, 1], [1, 1], True, True, ["loss", None]),
        ([FAILURE, 1], [1, 1], True, True, ["course: RuntimeError: lost its way", None]),
        ([FAILURE, 1], [FAILURE, 1], False, False, [None, None]),
        ([NO_MEMORY, 1], [1, 2], False, False, [None, None]),
        ([2, 1], [1, NO_MEMORY], False, False, [None, None]),
        ([2, 1], [1, "numbered"], True, False, [None, None]),
        (["numbered", 1], ["numbered", 1], True, False, [None, None]),
    ],
)
def test_ranks_compare_the_same_steps_and_come_to_the_same_end(
    rewritten: list[nn.Sequential],
    planned: Sequence[object],
    plain: Sequence[object],
    by_plan: bool,
    differs: bool,
    different: list[str | None],
) -> None:
    ranks = Ranks()

    def run_of(rank: int) -> Callable[[], dict[str, bytes]]:
        steps = [numbered() if w == "numbered" else always(w) for w in (planned[rank], plain[rank])]

        def run() -> dict[str, bytes]:
            rewritten[rank](X)
            made = steps["forward" not in vars(rewritten[rank])]()
            if isinstance(made, Exception):
                raise made
            return {"loss": str(made).encode()}

        return run

    def compare(rank: int) -> Compared:
        return compared(rewritten[rank], run_of(rank), agree=lambda value: ranks.agree(rank, value))

    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(2) as pool:
        warnings.simplefilter("always")
        found = list(pool.map(compare, range(2)))
    varies = "numbered" in plain and "numbered" not in planned
    assert any("its plain runs differ" in str(w.message) for w in caught) is varies
    assert [(f.by_plan, f.differs) for f in found] == [(by_plan, differs)] * 2
    assert [f.difference and f.difference.what for f in found] == different
    assert all("forward" in vars(module) for module in rewritten)


@pytest.mark.slow
def test_fake_inputs_cannot_be_compared() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="fake tensors do not have"):
        rematerialize(network(nn.Tanh), torch.randn(8, 16), memory_budget="100%", planner="periodic", self_check=True)


def test_fingerprints_tell_bits_shapes_and_types_apart() -> None:
    zero = torch.zeros(4)
    others = [
        -zero,
        zero.view(2, 2),
        zero.to(torch.float16),
        zero + 1e-45,
        zero.to_sparse() + torch.ones(4).to_sparse(),
    ]
    prints = [fingerprint(t) for t in (zero, *others, torch.zeros(0), torch.zeros(()), torch.zeros(3).bool())]
    assert len(set(prints)) == len(prints)
    assert fingerprint(zero) == fingerprint(torch.zeros(4))
    deep = torch.zeros((1,) * 20 + (2, 2))
    assert len({fingerprint(t) for t in (deep, deep.view(torch.int32), deep.view((1,) * 21 + (4,)))}) == 3
    complex_number = torch.tensor([1 + 2j])
    assert fingerprint(complex_number.conj()) == fingerprint(torch.tensor([1 - 2j]))
