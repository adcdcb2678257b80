"""Random modules that write into what lives outside of their calls, with gradients and without, bit by bit as plain."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from random_graphs import schedules
from random_modules import KINDS, RandomModule, Step, common, modules, refusals_left_out
from rewriting import rewrite
from torch import Tensor, nn
from training_steps import assert_equal_traces, loss_of, traces
from uses import same

from lightning_remat import profile, trace
from lightning_remat.execution.modified import ModifiedError

WIDTH, BATCH = 4, 16


class Writer(RandomModule):
    """Has a buffer, an attribute and a frozen parameter to write into."""

    state: Tensor

    def __init__(self, steps: list[Step]) -> None:
        super().__init__(steps, WIDTH)
        self.register_buffer("state", torch.ones(BATCH, WIDTH))
        self.memo = torch.zeros(BATCH, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def cut(self) -> None:
        """Whoever trains it cuts it from the step before."""
        self.state.detach_()
        self.memo.detach_()

    def _run(self, kind: str, part: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        return WRITES[kind](self, a, b) if kind in WRITES else super()._run(kind, part, a, b)


def _scales(m: Writer, a: Tensor, b: Tensor) -> Tensor:
    m.state.mul_(a.sigmoid() + 0.5)
    return a.sin() + b


def _sets_a_part(m: Writer, a: Tensor, b: Tensor) -> Tensor:
    m.state[::2] = a[::2].tanh()
    return b * 1.1


def _copies(m: Writer, a: Tensor, b: Tensor) -> Tensor:
    m.state.copy_(a.sin())
    return a * b.sigmoid()


def _scales_a_view(m: Writer, a: Tensor, b: Tensor) -> Tensor:
    view = m.state[:, 1:]
    view.mul_(b[:, 1:].sigmoid())
    return a.cos()


def _copies_by_index(m: Writer, a: Tensor, b: Tensor) -> Tensor:
    m.state.index_copy_(0, torch.arange(0, BATCH, 3), a[::3].tanh())
    return (a + 0.1) * b


def _adds_and_reads(m: Writer, a: Tensor, b: Tensor) -> Tensor:
    m.state.add_(b, alpha=0.1)
    return (a * m.state).tanh()


def _follows(m: Writer, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        m.state.lerp_(a, 0.1)
    return b * m.state.cos()


def _follows_in_part(m: Writer, a: Tensor, b: Tensor) -> Tensor:
    m.state[1:].mul_(0.5).add_(b.detach()[1:])
    return a + m.state


def _sets_an_attribute(m: Writer, a: Tensor, b: Tensor) -> Tensor:
    m.memo[:, :2] = a[:, :2].sin()
    return a + b


def _exchanges_an_attribute(m: Writer, a: Tensor, b: Tensor) -> Tensor:
    m.memo = m.memo * 0.5 + a.detach().mean()
    return b.tanh()


def _shrinks_what_is_frozen(m: Writer, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        m.frozen.mul_(0.9)
    return a * m.frozen + b


WRITES: dict[str, Callable[[Writer, Tensor, Tensor], Tensor]] = {
    "scales": _scales,
    "sets a part": _sets_a_part,
    "copies": _copies,
    "scales a view": _scales_a_view,
    "copies by index": _copies_by_index,
    "adds and reads": _adds_and_reads,
    "follows": _follows,
    "follows in part": _follows_in_part,
    "sets an attribute": _sets_an_attribute,
    "exchanges an attribute": _exchanges_an_attribute,
    "shrinks what is frozen": _shrinks_what_is_frozen,
    "reads": lambda m, a, b: (a * m.state).sin() + b,
    "reads a view": lambda m, a, b: a * m.state.t().sum(0).unsqueeze(1).tanh() + b,
    "reads an attribute": lambda m, a, b: a * b + m.memo.exp().clamp(max=3),
    "decides by values": lambda m, a, b: torch.where(m.state > 0.5, a, b),
}


def _step(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, Writer)
    module.cut()
    loss = loss_of(module(x)) + module.state.mean() + module.memo.square().mean()
    loss.backward()
    return loss


@pytest.mark.slow
def test_random_modules_that_write() -> None:
    kinds = st.one_of(st.sampled_from([*WRITES]), st.sampled_from(KINDS))
    lines = st.builds(Step, kinds, st.integers(-3, -1), st.integers(-4, -1))

    @given(st.data())
    @settings(common, max_examples=60)
    def check(data: st.DataObject) -> None:
        steps = data.draw(st.lists(lines, min_size=2, max_size=8))
        torch.manual_seed(data.draw(st.integers(0, 1000)))
        module, x = Writer(steps), torch.randn(BATCH, WIDTH)
        batches = [x, x + 1, x, x * 2]
        with refusals_left_out():
            plain = traces(copy.deepcopy(module), batches, step=_step)
        graph = profile(trace(module, x), x, repeats=1)
        schedule = data.draw(schedules(graph, in_forward=data.draw(st.booleans())))
        note(f"{steps} {schedule}")
        rewrite(module, schedule, x)
        assert_equal_traces(plain, traces(module, batches, step=_step))

    check()


class Viewed(nn.Module):
    """Reads a view of what comes in, and returns one of what it returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        last, middle = self.inner((x[1:] * 1.5).tanh())
        return last, middle, (last[::2] * 0.5).tanh()


@pytest.mark.slow
def test_what_others_write_before_the_backward_is_noticed_once_and_copied_from_then_on() -> None:
    """Into what came in, or what was returned: the memory of views that a recomputation reads."""

    @given(st.data())
    @settings(common, max_examples=40)
    def check(data: st.DataObject) -> None:
        module, written = Viewed(data.draw(modules())), data.draw(st.integers(0, 2))
        torch.manual_seed(0)
        given = torch.randn(BATCH, WIDTH)

        def gradients(m: nn.Module) -> list[Tensor]:
            torch.manual_seed(1)
            m.zero_grad()
            x = given.clone()
            made = m(x)
            loss = torch.stack([t.sum() for t in made]).sum()
            with torch.no_grad():
                (x, *made)[written].mul_(2)
            loss.backward()
            return [*(p.grad for p in m.parameters() if p.grad is not None), *(b.clone() for b in m.buffers())]

        plain = copy.deepcopy(module)
        ours = copy.deepcopy(module)
        with refusals_left_out():
            wanted = [t for _ in range(3) for t in gradients(plain)]
        operations = range(len(trace(ours, given).operations))
        kept = {n for n in operations if data.draw(st.booleans())}
        note(f"{kept}")
        rewrite(ours, kept, given)
        buffers = {name: b.clone() for name, b in ours.named_buffers()}
        for _ in range(20):
            try:
                first = gradients(ours)
                break
            except ModifiedError:
                ours.load_state_dict(buffers, strict=False)
        assert same(wanted, [*first, *gradients(ours), *gradients(ours)])

    check()


class OfAView(nn.Module):
    """Reads its parameter by a view, which autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).tanh().sin()


def test_what_is_written_into_a_parameter_stays_an_error() -> None:
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    module = OfAView()
    rewrite(module, [0], x)
    for _ in range(3):
        loss = module(x).sum()
        with torch.no_grad():
            module.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
