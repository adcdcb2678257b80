"""What surrounds a call in a forward, and functions with a backward of their own: nothing may be lost by a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from rewriting import Between, assert_equal_steps, recomputing_copy, rematerialized_copy, rewrite
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training_steps import assert_equal_traces, traces

from lightning_remat import TraceError, rematerialize, trace
from lightning_remat.operations.contexts import entered

X = torch.randn(5, 6)


class Inside(nn.Module):
    """The same in a submodule."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(x)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


straight_through = StraightThrough.apply  # bound before any trace, as libraries do


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class WithAttributes(torch.autograd.Function):
    """Holds tensors without telling autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.x, ctx.result, ctx.factor = x, x.sin() * factor, factor
        return ctx.result, x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, other: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.x.cos() * ctx.factor + 0 * ctx.result + other, None


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return gradient * y * 2, gradient * x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def with_attributes(x: Tensor) -> Tensor:
    a, b = WithAttributes.apply(x, 1.5)
    return a + b


FUNCTIONS = {
    "without-saved": StraightThrough.apply,
    "bound-at-import": straight_through,
    "saved-and-once-differentiable": Exponential.apply,
    "attributes": with_attributes,
    "setup-context": lambda x: WithSetup.apply(x, x.cos()),
}


def no_grad(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.no_grad()(function)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), *(nn.Sigmoid() for _ in range(4)))


def assert_equal_beside(part: nn.Module) -> None:
    """What cannot be captured runs as it is, and the layers around it are recomputed."""
    plain, x = nn.Sequential(wide(), part, wide()), torch.randn(256, 6)
    ours = rematerialized_copy(plain, x)
    assert_equal_traces(traces(plain, [x] * 3), traces(ours, [x] * 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "does",
    [
        pytest.param(lambda x: Doubled.apply(x * 1.5), id="dirty"),
        pytest.param(lambda x: x + no_grad(StraightThrough.apply)(x), id="no-grad"),
    ],
)
def test_functions_that_are_not_captured_run_as_they_are(does: Callable[[Tensor], Tensor]) -> None:
    assert_equal_beside(Inside(does))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Between, lambda does: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Inside(does))])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_custom_functions_keep_their_backward(name: str, kind: Callable[[Any], nn.Module]) -> None:
    module = kind(FUNCTIONS[name])
    assert_equal_steps(module, X, kept=[(), (1,), (2,)])


def test_a_custom_function_is_one_operation_that_returns_a_tuple() -> None:
    traced = trace(Between(StraightThrough.apply), X)
    assert [o.kind for o in traced.operations] == [
        "linear",
        "sigmoid",
        "custom_function",
        "getitem",
        "linear",
        "sigmoid",
    ]


def test_tracing_leaves_functions_and_torch_as_they_were() -> None:
    before = (StraightThrough.forward, WithSetup.setup_context, torch.autocast.__enter__, torch.set_rng_state)
    trace(Between(StraightThrough.apply), X)
    with pytest.raises(TraceError):
        trace(Between(forked), X)
    assert (StraightThrough.forward, WithSetup.setup_context, torch.autocast.__enter__, torch.set_rng_state) == before
    assert torch.is_grad_enabled()


def centred(x: Tensor) -> Tensor:
    with torch.no_grad():
        mean = x.mean()
        with torch.enable_grad():
            scale = x.std()
    return (x - mean) / scale


def in_bfloat16(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
        with torch.autocast("cpu", enabled=False):
            z = x.t() @ x
    return y.float() @ x @ z


@torch.autocast("cpu", enabled=False)
def in_full_precision(x: Tensor) -> Tensor:
    return F.linear(x.float(), x.float()) @ x.float()


def recomputed(x: Tensor) -> Tensor:
    return checkpoint(centred, x, use_reentrant=False)


def recomputed_in_backward(x: Tensor) -> Tensor:
    return checkpoint(centred, x, use_reentrant=True)


def by_other_algorithms(x: Tensor) -> Tensor:
    q = x.view(1, 1, -1, 6)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q.exp(), q.sin()).view(-1, 6)


def test_kernels_of_attention_are_chosen_where_the_forward_chooses_them() -> None:
    (attention,) = (o for o in trace(Between(by_other_algorithms), X).operations if "attention" in o.kind)
    before = torch.backends.cuda.flash_sdp_enabled()
    with entered(attention.parts[0]):
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() == before


@pytest.mark.sampled
@pytest.mark.parametrize(
    "does",
    [centred, in_bfloat16, in_full_precision, by_other_algorithms, recomputed],
    ids=["no-grad", "autocast", "full-precision", "kernels", "checkpoint"],
)
@pytest.mark.parametrize("outer", [False, True])
def test_contexts_within_a_forward_hold(does: Callable[[Tensor], Tensor], outer: bool) -> None:
    def step(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outer):
            loss = module(*args).float().square().sum()
        loss.backward()
        return loss

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outer):
        assert_equal_steps(Between(does), X, step=step, kept=[(), (1,), (3,)])


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        noisy = F.dropout(x, 0.5)
    return noisy * torch.rand_like(noisy)


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        shift = x.mean()
    return x + shift


def with_packed_tensors(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        return x.exp().sin()


def with_forces(x: Tensor) -> Tensor:
    positions = x.detach().requires_grad_()
    energy = (positions**3).sum()
    (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
    return x * forces


STOPS = {
    forked: "cannot be captured as one graph",
    with_packed_tensors: "saved_tensors_hooks",
    with_forces: r"torch\.autograd\.grad",
    recomputed_in_backward: "use_reentrant=True",
    in_inference_mode: "inference mode",
}


@pytest.mark.parametrize("does", STOPS)
def test_what_a_trace_cannot_carry_is_refused_in_the_forward_itself(does: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match=STOPS[does]):
        trace(Between(does), X)


@pytest.mark.slow
@pytest.mark.parametrize("does", STOPS)
def test_and_runs_as_it_is_in_a_submodule(does: Callable[[Tensor], Tensor]) -> None:
    assert_equal_beside(Inside(does))
    assert not torch.is_inference_mode_enabled()


class ThroughTheModel(nn.Module):
    """Differentiates through what ran before it."""

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(x.sum(), inputs, create_graph=True)
        return x + gradient.sum()


def test_differentiating_through_other_operations_is_refused() -> None:
    class Outer(Between):
        def __init__(self) -> None:
            super().__init__(lambda x: x)
            self.through = ThroughTheModel()

        def forward(self, x: Tensor) -> Tensor:
            return self.through(super().forward(x), x)

    x = X.clone().requires_grad_()
    with pytest.raises((RuntimeError, TraceError), match=r"autograd\.grad|differentiate"):
        recomputing_copy(Outer(), x)(x)


def test_tracing_under_no_grad_is_tracing_with_gradients() -> None:
    with torch.no_grad():
        module = Between(centred)
        rewrite(module, (), X)
    module(X).sum().backward()
    assert module.first.weight.grad is not None


class Breaking(nn.Module):
    """A part that is worth planning, a break, and what is not."""

    def __init__(self, last: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.GELU())
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.last(self.inner, h)


def checkpointed(inner: nn.Module, h: Tensor) -> Tensor:
    return cast(Any, checkpoint(inner, h, use_reentrant=False))


def reentrant(inner: nn.Module, h: Tensor) -> Tensor:
    return cast(Any, checkpoint(inner, h, use_reentrant=True))


@pytest.mark.slow
@pytest.mark.parametrize("last", [checkpointed, reentrant, lambda inner, h: Exponential.apply(inner(h))])
def test_parts_that_are_not_planned_do_what_the_user_wrote(last: Callable[[nn.Module, Tensor], Tensor]) -> None:
    plain, x = Breaking(last), torch.randn(256, 6)
    ours = copy.deepcopy(plain)
    plan = rematerialize(ours, x, memory_budget="95%", planner="periodic")
    assert plan.rung == "regions"
    assert plan.num_recomputed
    assert_equal_traces(traces(plain, [x] * 3), traces(ours, [x] * 3))


class Recurrent(nn.Module):
    """Uses one weight several times, under autocast of its own: it is cast once."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(6):
                x = x + torch.tanh(self.cell(x))
        return x


def test_what_autocast_casts_once_is_cast_once() -> None:
    plain, x = Recurrent(), torch.randn(256, 6)
    ours = recomputing_copy(plain, x, kept=(0, 2, 5))
    assert_equal_traces(traces(plain, [x] * 3), traces(ours, [x] * 3))
