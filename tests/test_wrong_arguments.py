"""What is easily handed over in place of something else is refused by name, with where to get what is expected."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_remat import TraceError, find_batch_size, plan, profile, rematerialize, simulate, trace

X = torch.ones(2, 3)


def loss_of(batch: torch.Tensor) -> torch.Tensor:
    return batch.sum()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda module: trace(module.forward, X), "got a method, expected a Module: the first argument of trace"),
        (lambda module: rematerialize(loss_of, X), "got a function, expected a Module: the first argument of remat"),
        (
            lambda module: rematerialize(module, X, "80%"),
            r"Linear\.forward cannot.*'80%' as its input number 2.*budget='80%'",
        ),
        (
            lambda module: rematerialize(module, X, 1 << 20),
            r"1048576 as its input number 2: too many positional arguments",
        ),
        (lambda module: find_batch_size(loss_of, X, loss_of), "got a function, expected a Module: the one that loss_"),
        (lambda module: profile(module, X), "got a Linear, expected a TracedModule: what trace returns"),
        (lambda module: plan(module, 1 << 20), "got a Linear, expected a Graph: what profile returns"),
        (lambda module: plan(trace(module, X), 1 << 20), "got a TracedModule, expected a Graph: what profile returns"),
        (lambda module: simulate(module, "F0 B0"), "got a Linear, expected a Graph: what profile returns"),
        (lambda module: simulate(profile(trace(module, X), X), "F0 B0"), r"got a str, expected a Schedule.*\.parse"),
    ],
)
def test_something_else_is_refused(call: Callable[[nn.Module], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(nn.Linear(3, 3))


def test_inputs_that_do_not_go_with_the_trace_are_refused_as_such() -> None:
    traced = trace(nn.Linear(3, 3), X)
    with pytest.raises(TraceError, match=r"Linear was traced with other inputs, or.*Remedy: profile it"):
        profile(traced, torch.ones(2, 4))
    with pytest.raises(TraceError, match="Linear was traced with other inputs, or"):
        profile(traced)
    assert len(profile(traced, X).nodes) == 1


class NamedAsOurs(nn.Module):
    """Its forward has arguments that have the names of options of `profile`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Sigmoid())))

    def forward(self, x: torch.Tensor, repeats: int = 1, with_scratch: bool = False) -> torch.Tensor:
        for _ in range(repeats):
            x = self.layers(x) + with_scratch
        return x


class InParts(NamedAsOurs):
    """Calls a part with such arguments between two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.part = NamedAsOurs()

    def forward(self, x: torch.Tensor, repeats: int = 1, with_scratch: bool = False) -> torch.Tensor:
        h = self.layers(x)
        torch._dynamo.graph_break()  # pyright: ignore[reportPrivateUsage]
        return self.part(h, repeats=repeats, with_scratch=with_scratch)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [NamedAsOurs, InParts])
def test_a_forward_may_have_arguments_named_as_ours(kind: type[nn.Module]) -> None:
    module, x = kind(), torch.randn(256, 8)
    wanted = module(x, repeats=2, with_scratch=True)
    plan = rematerialize(module, x, repeats=2, with_scratch=True, memory_budget="80%")
    assert plan.num_recomputed
    out = module(x, repeats=2, with_scratch=True)
    out.sum().backward()
    assert torch.equal(out, wanted)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is (deprecated|not supported)")
def test_a_compiled_module_is_refused_as_such_whatever_its_inputs() -> None:
    compiled = torch.jit.script(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"is a ScriptModule\. Remedy"):
        rematerialize(compiled, X, 5)
