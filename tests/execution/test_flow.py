"""Which backwards have run before others: judged by running autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_remat.execution.flow import Flow
from lightning_remat.operations.saved_tensors import held_tensors

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    torch.exp,
    lambda t: t * 2,
    lambda t: t.view(-1),
    lambda t: t.chunk(2)[0].repeat(2),
    lambda t: t.tanh().cos(),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [torch.add, torch.mul, lambda a, b: a.sin() * b.cos()]


@dataclass
class Recorded:
    """A random graph of operations, the nodes that each of them made, and which of these have run."""

    leaves: list[Tensor]
    outputs: list[Tensor]
    made: dict[int, set[Any]]
    ran: list[Any]

    def flow(self) -> Flow:
        return Flow(self.made, (), [t.grad_fn for t in self.outputs])


@st.composite
def recorded(draw: st.DrawFn) -> Recorded:
    leaves = [torch.randn(4, requires_grad=True) for _ in range(draw(st.integers(1, 3)))]
    values, made = list(leaves), dict[int, set[Any]]()
    for n in range(draw(st.integers(2, 7))):
        which = [draw(st.integers(max(0, len(values) - 4), len(values) - 1)) for _ in range(draw(st.integers(1, 2)))]
        function: Any = draw(st.sampled_from(UNARY if len(which) == 1 else BINARY))
        values.append(function(*(values[i] for i in which)))
        made[n] = {values[-1].grad_fn}
    last = draw(st.sets(st.integers(len(leaves), len(values) - 1), max_size=2)) | {len(values) - 1}
    found = Recorded(leaves, [values[i] for i in sorted(last)], made, [])
    for node in nodes_above(t.grad_fn for t in values[len(leaves) :]):
        node.register_prehook(lambda _gradients, node=node: found.ran.append(node))
    return found


def nodes_above(nodes: Any) -> set[Any]:
    found, stack = set[Any](), list(nodes)
    while stack:
        node = stack.pop()
        if node is not None and node not in found and node.next_functions:
            found.add(node)
            stack += [following for following, _ in node.next_functions]
    return found


def own_nodes(graph: Recorded) -> dict[int, set[Any]]:
    """Of each operation, those that no operation before has made."""
    before, found = set[Any](), dict[int, set[Any]]()
    for n, ends in graph.made.items():
        found[n] = nodes_above(ends) - before
        before |= found[n]
    return found


@pytest.mark.parametrize("examples", [20, pytest.param(800, marks=pytest.mark.slow)])
def test_what_is_said_to_run_before_does(examples: int) -> None:
    """Whatever outputs and leaves autograd is asked for."""
    found: set[tuple[bool, bool]] = set()

    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        graph = data.draw(recorded())
        flow, own = graph.flow(), own_nodes(graph)
        says = {(a, b): flow.has_run_before(a, b) for a, b in product(own, own) if own[a] and own[b] and a != b}
        found.update((held, a < b) for (a, b), held in says.items())
        for outputs, leaves in product(subsets(graph.outputs), subsets(graph.leaves)):
            graph.ran.clear()
            seeds = [torch.ones_like(t) for t in outputs]
            torch.autograd.grad(outputs, leaves, seeds, retain_graph=True, allow_unused=True)
            for (a, b), is_said in says.items():
                if is_said:
                    assert_ran_before(graph, own, a, b)

    check()
    assert {(True, False), (False, False)} <= found, "both answers are given"


def assert_ran_before(graph: Recorded, own: dict[int, set[Any]], a: int, b: int) -> None:
    ran = graph.ran
    of_b = [k for k, node in enumerate(ran) if node in own[b]]
    of_a = [k for k, node in enumerate(ran) if node in graph.made[a]]
    assert not of_b or (of_a and of_a[0] < of_b[0])


def subsets(items: Sequence[Any]) -> list[list[Any]]:
    chosen = product([False, True], repeat=len(items))
    return [[t for t, is_in in zip(items, which, strict=True) if is_in] for which in chosen if any(which)]


def recorded_as(**made: Tensor) -> Flow:
    """Operations of which the last is returned."""
    return Flow({n: {t.grad_fn} for n, t in enumerate(made.values())}, (), [[*made.values()][-1].grad_fn])


def test_a_chain_runs_in_order() -> None:
    x = torch.randn(3, requires_grad=True)
    a = x.sin()
    b = a.cos()
    flow = recorded_as(a=a, b=b, c=b * 2)
    assert flow.has_run_before(2, 0)
    assert not flow.has_run_before(0, 2)
    assert flow.is_one_node(0)


def test_a_function_of_the_users_need_not_read_what_it_saved() -> None:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    flow = recorded_as(a=Custom.apply(torch.randn(3, requires_grad=True)))
    assert flow.is_told(0)
    assert not flow.is_one_node(0)


WEIGHT = torch.randn(4, 4)

FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "sin": (torch.sin, 1),
    "gelu": (F.gelu, 1),
    "mul": (torch.mul, 2),
    "matmul": (torch.matmul, 2),
    "linear": (lambda x, w: F.linear(x, w), 2),
    "linear of a view": (lambda x, w: F.linear(x.view(2, 2, 4), w), 2),
    "layer norm": (lambda x: F.layer_norm(x, (4,)), 1),
    "log softmax": (lambda x: F.log_softmax(x, 1), 1),
    "tanh": (torch.tanh, 1),
    "where": (lambda x, y: torch.where(WEIGHT > 0, x, y), 2),
    "pow": (lambda x: x**3, 1),
    "division": (lambda x, y: x / (y * y + 1), 2),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), 1),
    "conv": (lambda x, w: F.conv1d(x.view(1, 4, 4), w.view(4, 4, 1)), 2),
    "chunks": (lambda x: torch.mul(*x.chunk(2, 1)), 1),
    "attention": (lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None]), 2),
    "huber": (lambda x, y: F.huber_loss(x, y), 2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_held_may_be_emptied_and_filled_again(name: str) -> None:
    function, arity = FUNCTIONS[name]
    leaves = [torch.randn(4, 4, requires_grad=True) for _ in range(arity)]

    def gradients(*, is_emptied: bool) -> list[Tensor]:
        given = [t * 1 for t in leaves]
        result = function(*given)
        found = held_tensors([result])
        assert found is not None
        here = [t for t in given if any(t is h for h in found)]
        values = [t.detach().clone() for t in here]
        for t in here if is_emptied else ():
            t.data = torch.empty(0)
        for t, value in zip(here, values, strict=True) if is_emptied else ():
            t.data = value
        return list(torch.autograd.grad(result.square().sum(), leaves))

    plain, emptied = gradients(is_emptied=False), gradients(is_emptied=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, emptied, strict=True))


@pytest.mark.parametrize(("name", "which"), [("sin", [0]), ("gelu", [0]), ("mul", [0, 1]), ("tanh", []), ("where", [])])
def test_what_was_given_is_held_as_it_is(name: str, which: list[int]) -> None:
    function, arity = FUNCTIONS[name]
    given = [torch.randn(4, 4, requires_grad=True) for _ in range(arity)]
    held = held_tensors([function(*given)])
    assert held is not None
    assert [k for k, t in enumerate(given) if any(t is h for h in held)] == which


def test_of_a_function_of_the_users_nothing_is_said() -> None:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.saved_tensors[0]

    assert held_tensors([Custom.apply(torch.randn(3, requires_grad=True)).sin()]) is None


def test_of_what_was_written_since_it_was_saved_nothing_is_said() -> None:
    x = torch.randn(3, requires_grad=True)
    assert held_tensors([x.exp().mul_(2)]) is None


def test_of_one_of_several_views_whose_base_was_written_since_nothing_is_said() -> None:
    base = torch.randn(4, requires_grad=True) * 1
    left, right = base.chunk(2)
    product = left * right
    base.relu_()
    assert held_tensors([product]) is None
