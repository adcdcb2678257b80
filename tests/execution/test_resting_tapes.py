"""What autograd saves for one backward alone gives up its memory in place, and is filled by a recomputation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from resting_cases import Before, Between, assert_right_after_a_failed_fill, rested_tapes
from rewriting import recomputing_copy
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_steps import assert_equal_traces, step_peak, traces
from uses import same

from lightning_remat import devices, profile, simulate, trace
from lightning_remat.execution.resting_storages import RestingTape
from lightning_remat.execution.rewriter import programs_in
from lightning_remat.operations.routes import Route, reader_of
from lightning_remat.schedules.compiled_simulator import Judge
from lightning_remat.schedules.graph import Graph, Node
from lightning_remat.schedules.schedule import Schedule

X = torch.randn(4, 6)
MEAN = Route((".grad_fn",), (type(F.layer_norm(X.clone().requires_grad_(), (6,)).grad_fn),), "._saved_result1")
"""Of a layer norm."""


def _attention(m: Any, x: Tensor, dropout: float) -> Tensor:
    query, key, value = (t[:, None, None] for t in (m.a(x), m.b(x), x))
    return m.c(F.scaled_dot_product_attention(query, key, value, None, dropout)[:, 0, 0])


TAPED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layer norm": lambda m, x: m.c(F.layer_norm(m.a(x), (6,))),
    "group norm": lambda m, x: m.c(F.group_norm(m.a(x), 2)),
    "batch norm": lambda m, x: m.c(F.batch_norm(m.a(x), None, None, training=True)),
    "dropout": lambda m, x: m.c(F.dropout(m.b(F.dropout(m.a(x), 0.5)), 0.3)),
    "attention": lambda m, x: _attention(m, x, 0.5),
    "entropy": lambda m, x: m.c(F.cross_entropy(m.b(x), x.argmax(1), reduction="none")[:, None].expand(-1, 6)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", TAPED)
@pytest.mark.usefixtures("memory_changes_hands")
def test_steps_are_the_plain_ones(name: str) -> None:
    module, batches = Before(TAPED[name]), [X, X + 1, X[:3], X - 1, X[:2]]
    ours = recomputing_copy(module, X)
    assert_equal_traces(traces(copy.deepcopy(module), batches), traces(ours, batches))
    assert rested_tapes(ours)


@pytest.mark.slow
@pytest.mark.parametrize("first", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("dropout", [0.5, 0.0])
@pytest.mark.usefixtures("memory_changes_hands")
def test_a_tape_of_another_kernel_than_was_learned_is_right(dropout: float, first: SDPBackend) -> None:
    module = Before(lambda m, x: _attention(m, x, dropout))
    kernels = [first, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, first]
    with sdpa_kernel([first, SDPBackend.MATH]):
        ours = recomputing_copy(module, X)
    found: list[list[Tensor]] = []
    for m in (module, ours):
        torch.manual_seed(0)
        made: list[Tensor] = []
        for step, kernel in enumerate(kernels):
            with sdpa_kernel([kernel, SDPBackend.MATH]):
                loss = m(X + step).sum()
            loss.backward()
            made += [loss.detach(), *(p.grad.clone() for p in m.parameters() if p.grad is not None)]
        found.append(made)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert rested_tapes(ours) or first is SDPBackend.FLASH_ATTENTION


def test_a_route_ends_where_it_did_or_nowhere() -> None:
    read, x = reader_of([MEAN]), X.clone().requires_grad_()
    made: Any = F.layer_norm(x, (6,))
    found = read(made)
    assert found
    assert same(found.tensors[0], made.grad_fn._saved_result1)
    assert found.sizes == [storage.nbytes() for storage in found.storages] == [made.grad_fn._saved_result1.nbytes]
    for other in (F.group_norm(x, 2), x.relu(), x, F.layer_norm(X, (6,))):
        assert read(other) is None
    needs_no_other = reader_of([Route((".grad_fn",), (type((x * x).grad_fn),), "._saved_other")])
    assert needs_no_other(x * x)
    assert needs_no_other(X * x) is None  # what the gradient of X would read is not saved


class Unrolled(nn.Module):
    """A recurrent network of cells."""

    def __init__(self, cell: Callable[[int, int], nn.Module], steps: int = 6) -> None:
        super().__init__()
        self.cells, self.steps = nn.ModuleList(cell(6, 6) for _ in range(2)), steps

    def forward(self, x: Tensor) -> Tensor:
        states: list[Any] = [None, None]
        made: list[Tensor] = []
        for _ in range(self.steps):
            h = x
            for k, cell in enumerate(self.cells):
                states[k] = cell(h, states[k])
                h = states[k][0] if isinstance(states[k], tuple) else states[k]
            made.append(h)
        return torch.stack(made)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.slow
def test_recurrent_cells_need_no_hooks(cell: Any, bias: bool) -> None:
    module = Unrolled(lambda *sizes: cell(*sizes, bias=bias))
    ours = recomputing_copy(module, X, kept=range(0, 64, 5))
    batches = [X, X + 1, X[:3], X - 1]
    assert_equal_traces(traces(copy.deepcopy(module), batches), traces(ours, batches))
    (program,) = programs_in(ours)
    assert len(program.hooked) > 10
    assert not program.variants[-1].hooked
    assert rested_tapes(ours) > 5


@pytest.mark.sampled
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.usefixtures("memory_changes_hands")
@pytest.mark.slow
def test_memory_is_given_up_and_no_more_is_needed_than_in_the_first_step(cell: Any) -> None:
    module, x = Unrolled(cell, steps=12), torch.randn(256, 6)
    ours = recomputing_copy(module, x, kept=range(0, 128, 9))
    peaks = [step_peak(ours, x) for _ in range(3)]
    assert rested_tapes(ours)
    assert max(peaks[1:]) <= peaks[0] < step_peak(module, x)


def test_a_cast_that_autocast_keeps_for_others_does_not_rest() -> None:
    def forward(m: Between, x: Tensor) -> Tensor:
        for _ in range(3):
            x = m.a(x).sigmoid()
        return x

    module = Between(forward)
    ours = recomputing_copy(module, X)
    found: list[list[Tensor]] = []
    for m in (module, ours):
        made: list[Tensor] = []
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = m(X + step).sum()
            loss.backward()
            made += [loss.detach(), *(p.grad.clone() for p in m.a.parameters() if p.grad is not None)]
        found.append(made)
    assert all(map(torch.equal, *found))


def test_hooks_around_a_forward_are_not_asked_for_what_they_keep() -> None:
    module = Before(TAPED["layer norm"])
    ours = recomputing_copy(module, X)
    for _ in range(2):
        ours(X).backward()
    assert rested_tapes(ours)
    num_asked = [0]

    def kept(tensor: Tensor) -> Tensor:
        num_asked[0] += 1
        return tensor

    for m in (module, ours):
        m.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, kept):
            loss = m(X)
        assert not num_asked[0]
        loss.backward()
        num_asked[0] = 0
    for name, p in module.named_parameters():
        assert p.grad is None or same(p.grad, ours.get_parameter(name).grad)


def test_what_a_function_of_the_users_saves_keeps_its_hooks() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.sin())
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * ctx.saved_tensors[0]

    module = Between(lambda m, x: m.c(Doubled.apply(m.a(x))))
    ours = recomputing_copy(module, X)
    assert_equal_traces(traces(copy.deepcopy(module), [X, X + 1, X]), traces(ours, [X, X + 1, X]))
    assert not rested_tapes(ours)


def test_a_step_that_failed_while_filling_leaves_the_next_one_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_right_after_a_failed_fill(Before(TAPED["layer norm"]), X, RestingTape, monkeypatch)


def test_a_recomputation_with_another_tape_is_an_error_that_names_the_operation() -> None:
    made = nn.functional.layer_norm(X.clone().requires_grad_(), (6,))
    tape, values = RestingTape(0, "block.norm", [MEAN]), list[Any]([None])
    tape.rest(values, made)
    other = nn.functional.layer_norm(torch.randn(5, 6, requires_grad=True), (6,))
    with pytest.raises(RuntimeError, match=r"block.norm saved other tensors .*of \[16\] bytes then, \[20\] now"):
        tape.fill(values, other)
    tape.fill(values, nn.functional.layer_norm(X.clone().requires_grad_(), (6,)))
    assert values == [None]


def test_what_others_hold_than_did_the_first_time_stays() -> None:
    tape, values = RestingTape(0, "norm", [MEAN]), list[Any]([None])
    for is_held in (False, True):
        made = nn.functional.layer_norm(X.clone().requires_grad_(), (6,))
        held: Any = cast(Any, made.grad_fn)._saved_result1.view(-1) if is_held else None
        values[0] = None
        tape.rest(values, made)
        assert (values[0] is None) == is_held
        assert held is None or held.untyped_storage().nbytes()


@pytest.mark.skipif(not devices.can_forbid_access, reason="in this build of PyTorch it is a null pointer")
def test_who_reads_it_too_early_gets_an_error_that_names_the_operation() -> None:
    x = X.clone().requires_grad_()
    tape, values = RestingTape(0, "block.norm", [MEAN]), list[Any]([None])
    made = F.layer_norm(x, (6,))
    tape.rest(values, made)
    with pytest.raises(RuntimeError, match=r"what block.norm saved for its backward is read before it was made again"):
        made.sum().backward(retain_graph=True)
    again = F.layer_norm(X.clone().requires_grad_(), (6,))
    tape.fill(values, again)
    made.sum().backward()
    with pytest.raises(RuntimeError, match="invalid"):
        again.sum().backward()


@pytest.mark.parametrize("is_held", [False, True])
def test_what_others_hold_of_a_recomputation_stays_theirs(is_held: bool) -> None:
    tape, values = RestingTape(0, "norm", [MEAN]), list[Any]([None])
    made, again = (nn.functional.layer_norm(X.clone().requires_grad_(), (6,)) for _ in range(2))
    expected = cast(Any, made.grad_fn)._saved_result1.clone()
    tape.rest(values, made)
    held: Any = cast(Any, again.grad_fn)._saved_result1.view(-1) if is_held else None
    tape.fill(values, again)
    assert same(cast(Any, made.grad_fn)._saved_result1, expected)
    assert held is None or same(held, expected.view(-1))


@pytest.mark.parametrize(
    ("text", "price"),
    [
        ("F0 T0 F1 F2 B2 D2 F0 B1 D1 B0 D0 T0", 3),  # empty in between
        ("F0 F1 T0 F2 B2 D2 F0 B1 D1 B0 D0 T0", 13),  # when others have run it is too late
        ("F0 T0 F1 F2 F0 T0 B2 D2 F0 B1 D1 B0 D0 T0", 16),  # twice
        ("F0 T0 F1 D0 F0 T0 D0 F2 B2 D2 B1 D1 F0 B0 D0 T0", 16),  # within the forward
    ],
)
def test_a_tape_that_is_brought_once_needs_no_hooks(text: str, price: float) -> None:
    first = Node("first", output_bytes=8, tape_bytes=8, tape_price=3.0, hook_price=10.0, is_tape_held=True)
    graph = Graph((first, *(Node(name, inputs=(k,), output_bytes=8) for k, name in enumerate(("second", "third")))))
    schedule = Schedule.parse(text)
    simulation = simulate(graph, schedule)
    assert simulation.recompute_seconds == price
    assert Judge(graph).cost(schedule) == (simulation.peak_bytes, simulation.seconds)


def test_a_profile_tells_which_tapes_can_be_reached() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Dropout(0.5), nn.GELU())
    graph = profile(trace(module, X), X, repeats=1)
    assert [node.is_tape_held for node in graph.nodes] == [False, True, True, False]
