"""What is listed as indifferent does the same whether autograd records it or not: kernel by kernel, bit by bit."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat.operations import indifferent
from lightning_remat.operations.indifferent import is_indifferent

UNARY = ["neg", "abs", "square", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "erf", "sigmoid", "tanh", "relu", "gelu"]
UNARY += ["silu", "float", "half", "bfloat16", "contiguous", "flatten", "t", "squeeze"]
EXAMPLES: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    **dict.fromkeys(UNARY, lambda x, y: (x,)),
    **dict.fromkeys(["add", "sub", "mul", "div", "truediv", "pow"], lambda x, y: (x, y)),
    **dict.fromkeys(["mean", "softmax"], lambda x, y: (x, -1)),
    **dict.fromkeys(["cat", "stack"], lambda x, y: ([x, y], 1)),
    **dict.fromkeys(["chunk", "split"], lambda x, y: (x, 2, -1)),
    **dict.fromkeys(["sum", "unbind", "unsqueeze"], lambda x, y: (x, 0)),
    "clamp": lambda x, y: (x, 0.2, 0.9),
    "where": lambda x, y: (x > y, x, y),
    "getitem": lambda x, y: (x, (slice(1, 3), None, [0, 2])),
    "reshape": lambda x, y: (x, (-1,)),
    "view": lambda x, y: (x, (4, 2, 3)),
    "permute": lambda x, y: (x, (1, 0)),
    "transpose": lambda x, y: (x, 0, 1),
    "expand": lambda x, y: (x, 5, 4, 6),
    "mm": lambda x, y: (x, y.t()),
    "bmm": lambda x, y: (x[None], y.t()[None]),
    "addmm": lambda x, y: (y[:, 0], x, y.t()),
    "baddbmm": lambda x, y: (y[None, :, :4], x[None], y.t()[None]),
    "layer_norm": lambda x, y: (x[:, None], (6,), y[0], y[1]),
    "group_norm": lambda x, y: (x.t()[None], 3, y[0], y[1]),
    "linear": lambda x, y: (x[:, None], y, y[:, 0]),
    "dropout": lambda x, y: (x, 0.0),
    "lstm_cell": lambda x, y: (x, (x[:, :2], y[:, :2]), *_cell(x, y, 4)),
    **dict.fromkeys(["rnn_tanh_cell", "rnn_relu_cell"], lambda x, y: (x, y[:, :2], *_cell(x, y, 1))),
    "embedding": lambda x, y: (torch.tensor([[0, 3], [2, 2]]), x),
    **dict.fromkeys(["zeros", "ones"], lambda x, y: (x.shape,)),
    **dict.fromkeys(["new_zeros", "new_ones"], lambda x, y: (x, (2, 3))),
    **dict.fromkeys(["zeros_like", "ones_like"], lambda x, y: (x,)),
    "full": lambda x, y: (x.shape, 2.5),
    "new_full": lambda x, y: (x, (2, 3), 2.5),
    "full_like": lambda x, y: (x, 2.5),
    "arange": lambda x, y: (7,),
}


def _cell(x: Tensor, y: Tensor, gates: int) -> tuple[Tensor, ...]:
    """The weights and biases of a cell of two."""
    inner, outer = (torch.cat([x, y] * gates)[: 2 * gates] for _ in range(2))
    return inner, outer[:, :2], inner[:, 0], outer[:, 1]


class Kernels(TorchDispatchMode):
    """Notes what runs below autograd, and what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (tuple, list)) else [out]
        if func is not torch.ops.aten.detach.default:  # by which autograd saves an output
            self.seen.append((func, [(t.shape, t.stride(), t.dtype) for t in made if isinstance(t, Tensor)]))
        return out


def pairs(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors of 4 × 6: dense, transposed, cut out, expanded."""
    torch.manual_seed(0)
    yield torch.rand(4, 6).to(dtype), torch.rand(4, 6).to(dtype)
    yield torch.rand(6, 4).to(dtype).t(), torch.rand(6, 4).to(dtype).t()
    yield torch.rand(8, 9).to(dtype)[::2, 1:7], torch.rand(9, 12).to(dtype)[2:6, ::2]
    yield torch.rand(1, 6).to(dtype).expand(4, 6), torch.rand(4, 1).to(dtype).expand(4, 6)


def listed() -> list[tuple[str, Any]]:
    """The names and the targets of fx nodes."""
    lists = (
        indifferent._FUNCTIONS,
        {functional.relu, functional.silu, functional.dropout, functional.embedding},
        set() if indifferent._LINEAR_ASKS else {functional.linear},
        indifferent._METHODS,
    )
    found = [(f if isinstance(f, str) else f.__name__, f) for functions in lists for f in functions]
    return sorted(found, key=str)


def outcome(target: Any, args: tuple[Any, ...]) -> tuple[list[Any], list[Tensor]]:
    """The kernels that ran, and what came out; or the error."""
    with Kernels() as kernels:
        try:
            out = getattr(args[0], target)(*args[1:]) if isinstance(target, str) else target(*args)
        except RuntimeError as error:
            return [str(error)], []
    return kernels.seen, list(out) if isinstance(out, (tuple, list)) else [out]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "target"), listed())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_same_kernels_give_the_same_bits(name: str, target: Any, dtype: torch.dtype) -> None:
    graph = fx.Graph()
    example = EXAMPLES[name](*next(pairs(dtype)))
    nodes = [graph.placeholder(f"a{k}") if isinstance(a, Tensor) else a for k, a in enumerate(example)]
    kind = "call_method" if isinstance(target, str) else "call_function"
    assert is_indifferent(graph.create_node(kind, target, tuple(nodes)))
    num_done = 0
    for x, y in pairs(dtype):
        recorded = outcome(target, EXAMPLES[name](x.detach().requires_grad_(), y.detach().requires_grad_()))
        with torch.no_grad():
            bare = outcome(target, EXAMPLES[name](x, y))
        assert recorded[0] == bare[0]
        for a, b in zip(recorded[1], bare[1], strict=True):
            torch.testing.assert_close(a.detach(), b, rtol=0, atol=0, equal_nan=True)
        num_done += bool(recorded[1])
    assert num_done, "nothing ran"


def test_what_asks_for_gradients_is_not_listed() -> None:
    """A product of three and two dimensions is another kernel where the second one needs gradients."""
    x, y = torch.rand(3, 4, 6).transpose(0, 1), torch.rand(6, 5)
    recorded = outcome(torch.matmul, (x, y.clone().requires_grad_()))
    with torch.no_grad():
        assert outcome(torch.matmul, (x, y))[0] != recorded[0]
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    for target, args, kwargs in [
        (torch.matmul, (a, b), {}),
        (functional.linear, (a, b), {}),
        (functional.linear, (a, b, None), {}),
        (functional.relu, (a, True), {}),
        (functional.silu, (a,), {"inplace": True}),
        (functional.dropout, (a,), {}),
        (functional.dropout, (a, 0.5), {"training": True}),
        (functional.dropout, (a, 0.0, True, True), {}),
        (torch.add, (a, b), {"out": a}),
        (functional.embedding, (a, b, None, 1.0), {}),
        (functional.embedding, (a, b), {"max_norm": 1.0}),
        (functional.conv2d, (a, b), {}),
        (functional.scaled_dot_product_attention, (a, b, b), {}),
    ]:
        assert not is_indifferent(graph.call_function(target, args, kwargs))
    assert not is_indifferent(graph.call_method("add_", (a, b)))
