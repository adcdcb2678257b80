import copy
import random

import pytest
import torch
from rewriting import recomputing_copy
from torch import Tensor, nn

from lightning_remat import TraceError, trace
from lightning_remat.operations.operation import TracedModule

X = torch.randn(2, 3)


def described(traced: TracedModule) -> list[tuple[str, str, tuple[int, ...], int | None]]:
    return [(o.name, o.kind, o.inputs, o.view_of) for o in traced.operations]


class InPlace(nn.Module):
    """A residual block as torchvision writes it, and a view of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.bn(y)
        z += y
        return self.relu(z).flatten(1)


def test_in_place_operations_are_fused_and_views_are_nodes() -> None:
    traced = trace(InPlace(), torch.randn(2, 4, 3, 3))
    assert described(traced) == [
        ("conv", "conv2d", (), None),
        ("bn", "batch_norm+add+relu", (0,), None),
        ("flatten", "flatten", (1,), 1),
    ]
    norm = traced.operations[1]
    assert {traced.owned[n] for n in norm.writes} == {"bn.running_mean", "bn.running_var"}
    assert [n.name for n in norm.effects] == ["add_"]  # num_batches_tracked += 1
    assert {traced.owned[n] for n in traced.written} == {f"bn.{name}" for name, _ in InPlace().bn.named_buffers()}
    assert traced.outputs == (2,)


class Tuples(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.sigmoid().chunk(2, dim=1)
        return torch.cat([a * b.shape[1], b.view(b.size(0), -1)], dim=1)


def test_tuples_constants_and_shapes() -> None:
    traced = trace(Tuples(), torch.randn(2, 6))
    assert [(o.kind, o.view_of) for o in traced.operations] == [
        ("sigmoid", None),
        ("chunk", 0),
        ("getitem", 1),
        ("getitem", 1),
        ("mul", None),
        ("view", 3),
        ("cat", None),
    ]
    assert traced.constants == ()


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x[: x.shape[0] // 2].sigmoid() * x.shape[0]).relu()


def test_numbers_that_follow_from_the_batch_size_are_constants_of_a_step() -> None:
    traced = trace(Halves(), torch.randn(6, 3))
    assert [o.kind for o in traced.operations] == ["getitem", "sigmoid", "mul", "relu"]
    assert [n.name for n in traced.constants] == ["floordiv"]


class WritesBySize(nn.Module):
    """A size that is known only while the operation runs that both makes and overwrites what it is of."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.sigmoid()
        size = y.size()
        y.add_(torch.ones(size))
        return y.tanh() * torch.ones(size)


def test_a_size_of_what_is_overwritten_by_it_is_a_part_and_a_constant_for_others() -> None:
    traced = trace(WritesBySize(), torch.randn(4, 3))
    assert [o.kind for o in traced.operations] == ["sigmoid+ones+add", "tanh", "ones", "mul"]
    assert [n.target for n in traced.operations[0].parts] == ["sigmoid", "size", torch.ones, "add_"]
    (size,) = traced.constants
    assert size.target == "size"
    assert {traced.producer[n] for n in size.users} == {2}


class RunningSum(nn.Module):
    """What is summed up last needs the input, of which there are no gradients whose order could change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.deep, self.out = nn.Linear(3, 1), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x), 1)
        total += self.linear(x)
        total += self.out(self.deep(x).tanh())
        return total.sigmoid()


def test_what_is_added_to_a_running_sum_stays_apart_from_it() -> None:
    x = torch.randn(4, 3)
    kinds = ["linear", "linear", "tanh", "linear", "new_zeros+add", "sigmoid"]
    assert [o.kind for o in trace(RunningSum(), x).operations] == kinds
    # With gradients, only who returns one to the input counts.
    assert [o.kind for o in trace(RunningSum(), x.requires_grad_()).operations] == kinds


class OutOfOrder(nn.Module):
    """Random draws whose order a fusion by place alone would change."""

    def forward(self, x: Tensor) -> Tensor:
        a = nn.functional.dropout(x, 0.5)
        b = nn.functional.dropout(x, 0.5)
        a += b
        return a


def test_fusion_keeps_the_order_of_random_draws() -> None:
    (operation,) = trace(OutOfOrder(), torch.randn(8)).operations
    assert operation.kind == "dropout+add"
    assert len(operation.parts) == 3
    assert operation.is_random


class ReadsBeforeWrite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        before = y.sum()
        y[:, 0] = 0
        return y + before


def test_a_reader_of_the_old_value_is_fused_with_the_write() -> None:
    first, second = trace(ReadsBeforeWrite(), torch.randn(3, 3)).operations
    assert first.kind == "mul+sum+setitem"
    assert len(first.outputs) == 2
    assert second.inputs == (0,)


class WritesInput(nn.Module):
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return x.relu_() + sum(map(torch.sum, others))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x * self.calls).sigmoid().sigmoid()


class DrawsPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * random.random()).exp().sigmoid()


class DecidesAtRandom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid() if torch.rand(()) < 0.5 else x


class Positions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid() + torch.arange(3)


def test_tensors_made_from_constants() -> None:
    module = Positions()
    attributes = dict(vars(module))
    traced = trace(module, torch.randn(2, 3))
    assert [o.kind for o in traced.operations] == ["sigmoid", "arange", "add"]
    assert vars(module) == attributes


@pytest.mark.parametrize("shares_memory", [False, True])
def test_a_write_into_an_input_that_others_see_is_refused(shares_memory: bool) -> None:
    x = torch.randn(3, requires_grad=not shares_memory) * 1
    with pytest.raises(TraceError, match=r"writes in place into an input.*Remedy") as error:
        trace(WritesInput(), *([x, x[:2]] if shares_memory else [x]))
    assert error.value.where is not None
    assert error.value.where.startswith(f"{__file__}:")


def test_a_decision_by_values_is_no_single_graph() -> None:
    with pytest.raises(TraceError, match=r"cannot be captured as one graph.*Remedy") as error:
        trace(DecidesAtRandom(), torch.randn(3))
    assert error.value.where is not None
    assert error.value.where.startswith(__file__)


@pytest.mark.parametrize("module", [Counts(), DrawsPython()])
def test_what_python_counts_and_draws_is_counted_and_drawn_by_calls_alone(module: nn.Module) -> None:
    ours, state = recomputing_copy(module, X), random.getstate()
    trace(module, X)
    assert random.getstate() == state
    found = []
    for m in (module, ours):
        assert getattr(m, "calls", 0) == 0
        random.seed(3)
        x = X.clone().requires_grad_()
        results = [m(x).sum() for _ in range(3)]
        for result in results:
            result.backward()
        found.append(([r.item() for r in results], x.grad.tolist(), random.random(), getattr(m, "calls", 0)))
    assert found[0] == found[1]


def test_tracing_leaves_no_trace() -> None:
    module = InPlace()
    before = copy.deepcopy(module.state_dict())
    attributes = {name: dict(vars(m)) for name, m in module.named_modules()}
    trace(module, torch.randn(2, 4, 3, 3))
    assert {name: dict(vars(m)) for name, m in module.named_modules()} == attributes
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), before.values(), strict=True))


def test_nested_and_keyword_arguments() -> None:
    class Nested(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor], *, scale: float = 1.0, extra: Tensor | None = None) -> dict:
            a, b = pair
            return {"sum": (a + b) * scale, "none": extra}

    traced = trace(Nested(), (torch.randn(2), torch.randn(2)), scale=2.0)
    assert [o.kind for o in traced.operations] == ["add", "mul"]
    assert traced.operations[1].parts[0].args[1] == 2.0
    assert traced.owned == {}


def test_what_follows_under_the_same_autocast_is_real() -> None:
    """Autocast keeps its casts of parameters: a fake one, made by the trace, would be handed to the next forward."""
    module, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        trace(module, x)
        found = module(x)
    assert type(found) is Tensor
    assert torch.equal(found, expected)


def test_what_torch_export_made_is_traced() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4)
    exported = torch.export.export(net, (x,)).module()
    assert [o.kind for o in trace(exported, x).operations] == ["linear", "tanh", "linear"]


def test_operations_are_named_by_the_paths_of_their_modules_wherever_these_are_held() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"inner": nn.Sigmoid()})["inner"])
            self.by_key, self.listed = nn.ModuleDict({"q": nn.Linear(4, 4)}), [nn.Tanh()]
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1  # by which TorchDynamo asks the module's dictionary for what it holds
            self.last = x.detach()
            return self.listed[0](self.by_key["q"](self.layers(x)))

    names = [operation.name for operation in trace(Held(), torch.randn(2, 4)).operations]
    assert names == ["detach", "layers.0", "layers.1", "by_key.q", "listed.0"]
