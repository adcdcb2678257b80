"""What runs again as one function."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from rewriting import rewrite
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_steps import assert_equal_traces, traces

from lightning_remat import profile, trace
from lightning_remat.execution.assembly import compile_schedule
from lightning_remat.execution.forward import _Forward  # pyright: ignore[reportPrivateUsage]
from lightning_remat.execution.instructions import Do
from lightning_remat.execution.places import Place, Reference
from lightning_remat.execution.program import Program
from lightning_remat.execution.rewriter import programs_in
from lightning_remat.execution.stretches import Again
from lightning_remat.lowering import lower_kept
from lightning_remat.module_state.random_state import generators_in_use
from lightning_remat.operations.evaluation import compile_stretch, slots
from lightning_remat.schedules.schedule import Schedule


@pytest.mark.slow
def test_a_batch_norm_runs_again_with_its_neighbours_and_counts_once() -> None:
    """Where its own tape stays; what it writes in training goes to memory that nobody reads."""
    module = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU()) for _ in range(4)),
        nn.Conv2d(4, 4, 1),
    )
    x = torch.randn(2, 4, 6, 6)
    traced = trace(module, x)
    graph = profile(traced, x, repeats=1)
    again = [n for n, node in enumerate(graph.nodes) if node.kind in ("batch_norm", "gelu")]
    kept_tapes = _with_tapes(lower_kept(graph, {*range(len(graph.nodes))} - {*again}))
    program = compile_schedule(traced, kept_tapes, graph)
    stretches = [part for parts in program.before for part in parts if isinstance(part, Again)]
    joined = {graph.nodes[n].kind for part in stretches for what, n in part.instructions if what is Do.RUN_AGAIN}
    assert joined == {"batch_norm", "gelu"}
    ours, given = copy.deepcopy(module), torch.randn(2, 4, 6, 6)
    rewrite(ours, kept_tapes, x)
    assert_equal_traces(traces(module, [x, given, x]), traces(ours, [x, given, x]))


def _with_tapes(schedule: Schedule) -> Schedule:
    """The same, tapes kept until their backwards."""
    backward = next(k for k, action in enumerate(schedule) if action.kind == "B")
    return Schedule(tuple(a for k, a in enumerate(schedule) if a.kind != "T" or k > backward))


def _blocks(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(dropout)) for _ in range(4)), nn.Linear(8, 8)
    )


def _rewritten(module: nn.Module, x: torch.Tensor) -> Program:
    """Rewrites it so that it recomputes all but linear maps; its program."""
    traced = trace(module, x)
    graph = profile(traced, x, repeats=1)
    kept = {n for n, node in enumerate(graph.nodes) if node.kind == "linear"}
    rewrite(module, lower_kept(graph, kept), x)
    (program,) = programs_in(module)
    return program


@pytest.mark.slow
def test_hooked_and_random_operations_do_not_divide_a_forward() -> None:
    plain, x = _blocks(dropout=0.5), torch.randn(4, 8)
    ours = copy.deepcopy(plain)
    program = _rewritten(ours, x)
    assert program.hooked
    assert any(step.operation.is_random for step in program.steps)
    alone = [part for part in program.stretches if not callable(part)]
    assert {n for _, n in alone} == set(program.traced.outputs), "but for what the caller gets"
    torch.manual_seed(0)
    expected = traces(plain, [x, x, x])
    torch.manual_seed(0)
    assert_equal_traces(expected, traces(ours, [x, x, x]))


@pytest.mark.slow
def test_an_error_within_a_hooked_operation_leaves_no_hook_and_no_lock() -> None:
    plain, x = _blocks(dropout=0.5), torch.randn(4, 8)
    ours = copy.deepcopy(plain)
    _rewritten(ours, x)
    ours(x).sum().backward()  # what is learned in a first step
    for name in ("gelu", "bernoulli"):
        with pytest.raises(MemoryError), Failing(name):
            ours(x)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        with ThreadPoolExecutor(1) as other:
            assert other.submit(generators_in_use.acquire, blocking=False).result(), name
            other.submit(generators_in_use.release).result()
    plain.zero_grad()
    ours.zero_grad()
    torch.manual_seed(1)
    expected = traces(plain, [x])
    torch.manual_seed(1)
    assert_equal_traces(expected, traces(ours, [x]))


class Failing(TorchDispatchMode):
    """Kernels of an operation find no memory."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._name in str(func):
            raise MemoryError(self._name)
        return func(*args, **(kwargs or {}))


class Recorded(TorchDispatchMode):
    """Notes for each kernel of an operation whether gradients were on."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.seen: list[bool] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(self._name):
            self.seen.append(torch.is_grad_enabled())
        return func(*args, **(kwargs or {}))


def unrecorded(program: Program) -> set[str]:
    """The kinds of operations that run again without gradients."""
    done = [i for parts in program.before for part in parts if isinstance(part, Again) for i in part.instructions]
    again = {n for what, n in done if what is Do.RUN_AGAIN and not program.steps[n].is_recorded_again}
    return {program.traced.operations[n].kind for n in again}


@pytest.mark.parametrize("is_differentiated", [False, True])
def test_what_asks_for_no_gradients_runs_again_without(is_differentiated: bool) -> None:
    plain, x = _blocks(), torch.randn(4, 8, requires_grad=True)
    ours = copy.deepcopy(plain)
    assert unrecorded(_rewritten(ours, x)) == {"gelu"}
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x, create_graph=True)
    loss = ours(x).square().sum()
    with Recorded("aten.gelu.default") as recorded:
        (gradient,) = torch.autograd.grad(loss, x, create_graph=is_differentiated)
        assert torch.is_grad_enabled()
    assert recorded.seen == [False] * 4
    assert torch.equal(gradient, expected)
    if is_differentiated:
        for first in (expected, gradient):
            first.sum().backward()
        assert_equal_gradients(plain, ours)


def assert_equal_gradients(plain: nn.Module, ours: nn.Module) -> None:
    """Bitwise."""
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def test_an_error_in_a_stretch_without_gradients_leaves_them_on() -> None:
    ours, x = _blocks(), torch.randn(4, 8, requires_grad=True)
    _rewritten(ours, x)
    loss = ours(x).square().sum()
    with pytest.raises(MemoryError), Failing("aten.gelu.default"):
        torch.autograd.grad(loss, x, create_graph=True)
    assert torch.is_grad_enabled()


class Read(nn.Module):
    """Products of three dimensions choose a kernel by whether a factor needs gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            factor = torch.tanh(self.inner(x[0]))
            x = torch.sigmoid(torch.matmul(x.transpose(0, 1), factor).transpose(0, 1))
        return x


@pytest.mark.slow
def test_what_others_read_that_ask_for_gradients_is_made_without_and_asks_for_them() -> None:
    plain, x = Read(), torch.randn(8, 8, 8)
    ours, traced = copy.deepcopy(plain), trace(plain, x)
    graph = profile(traced, x, repeats=1)
    again = {n for n, node in enumerate(graph.nodes) if node.kind != "linear"} - set(graph.outputs)
    schedule = lower_kept(graph, {*range(len(graph.nodes))} - again)
    found = unrecorded(compile_schedule(traced, schedule, graph))
    assert "tanh" in found
    assert "matmul" not in found
    rewrite(ours, schedule, x)
    with Recorded("aten.tanh.default") as factors:
        given = traces(ours, [x, x])
    assert_equal_traces(traces(plain, [x, x]), given)
    assert factors.seen == ([True] * 3 + [False] * 3) * 2


def test_casts_of_autocast_do_not_pass_from_a_recomputation_to_the_next_forward() -> None:
    """Autocast keeps casts of parameters for its region: one made without gradients must not serve a run with them."""
    plain, x = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.GELU()))), torch.randn(4, 8)
    ours = copy.deepcopy(plain)
    with torch.autocast("cpu", torch.bfloat16):
        traced = trace(ours, x)
        graph = profile(traced, x, repeats=1)
        rewrite(ours, _with_tapes(lower_kept(graph, set())), x)
        if torch.__version__ >= "2.14":  # until then a linear layer may ask for gradients
            assert "linear" in unrecorded(next(iter(programs_in(ours))))
    for module in (plain, ours):
        with torch.autocast("cpu", torch.bfloat16):
            first = module(x).float().square().sum()
        with torch.autocast("cpu", torch.bfloat16):
            first.backward()
            module(x).float().square().sum().backward()
    assert_equal_gradients(plain, ours)


class Cells(nn.Module):
    """Reads items of tuples; the tuples themselves are discarded before."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[0], 4)
        for part in x.unbind(1):
            h, c = self.cell(part, (h, c))
        return h


@pytest.mark.slow
def test_saved_items_of_discarded_tuples_are_found_at_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x = Cells(), torch.randn(8, 6, 4)
    ours = copy.deepcopy(plain)
    traced = trace(ours, x)
    graph = profile(traced, x, repeats=1)
    again = {n for n, node in enumerate(graph.nodes) if node.kind in ("lstm_cell", "getitem")}
    rewrite(ours, lower_kept(graph, {*range(len(graph.nodes))} - again), x)
    ours(x).sum().backward()  # what is learned in a first step
    ours.zero_grad()
    searched: list[int] = []
    changed = _Forward._changed

    def noted(forward: _Forward, reference: Reference, places: tuple[Place, ...]) -> tuple[Place, ...]:
        searched.append(reference.operation)
        return changed(forward, reference, places)

    monkeypatch.setattr(_Forward, "_changed", noted)
    plain(x).sum().backward()
    ours(x).sum().backward()
    assert_equal_gradients(plain, ours)
    (program,) = programs_in(ours)
    assert len(program.learned) > 3
    assert not searched


class Named(nn.Module):
    """A size is computed under the name of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, n = self.a(x), x.size(0) * 2
        return torch.mul(h, h.sigmoid()).view(n, -1)


class Noting(list[str]):
    """Notes what it is told."""

    def begin(self, n: int) -> None:
        self.append(f"{n} begins")

    def end(self, n: int) -> None:
        self.append(f"{n} ends")

    def draw(self, n: int) -> None:
        self.append(f"{n} draws")

    def drawn(self) -> None:
        self.append("drawn")


def test_a_number_with_the_name_of_an_operation_is_none() -> None:
    traced = trace(Named(), torch.randn(6, 4))
    (constant,), names = traced.constants, [operation.name for operation in traced.operations]
    number, slot_of = names.index(constant.name), slots(traced)
    stretch = compile_stretch(
        [*traced.constants, traced.operations[number]], slot_of, is_first=True, attended={constant.name: number}
    )
    told = Noting()
    stretch([torch.ones(4, 4)] * len(slot_of), {}, told)
    assert told == [f"{number} begins", f"{number} ends"]
