"""What is chosen between implementations is, in a recomputation, what was chosen in the forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.backends import cuda, cudnn, mkldnn

from lightning_remat import rematerialize
from lightning_remat.module_state.algorithms import algorithms_in_force, set_algorithms
from lightning_remat.module_state.ambient import Ambient

C = cast(Any, torch)._C


CHOICES: dict[str, Callable[[], object]] = {
    "deterministic": partial(torch.use_deterministic_algorithms, True, warn_only=True),
    "cudnn.benchmark": partial(setattr, cudnn, "benchmark", True),
    "cudnn.allow_tf32": partial(setattr, cudnn, "allow_tf32", False),
    "mkldnn.enabled": partial(mkldnn.set_flags, False),
    "matmul.allow_tf32": partial(setattr, cuda.matmul, "allow_tf32", True),
    "matmul precision": partial(torch.set_float32_matmul_precision, "medium"),
    "matmul.fp32_precision": partial(setattr, cuda.matmul, "fp32_precision", "tf32"),
    "mkldnn.matmul.fp32_precision": partial(setattr, mkldnn.matmul, "fp32_precision", "bf16"),  # pyright: ignore
    "fp32_precision": partial(setattr, torch.backends, "fp32_precision", "tf32"),
    "fp16 reduction": partial(setattr, cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "bf16 split k": partial(setattr, cuda.matmul, "allow_bf16_reduced_precision_reduction", (False, False)),
    "fp16 accumulation": partial(setattr, cuda.matmul, "allow_fp16_accumulation", True),
    "math attention": partial(cuda.enable_math_sdp, False),
    "priority of attention": partial(C._set_sdp_priority_order, [0, 1, 2, 3, 4]),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
}


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """What a test chooses is chosen no more after it."""
    before = algorithms_in_force()
    yield
    for place in (("generic", "all"), ("cuda", "matmul"), ("mkldnn", "matmul")):
        C._set_fp32_precision_setter(*place, "none")  # as no public name puts back what was set one by one
    torch.set_float32_matmul_precision("highest")
    set_algorithms(before, algorithms_in_force())


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_a_choice_is_noticed_and_put_back(choose: Callable[[], object]) -> None:
    before, settings = algorithms_in_force(), Ambient.current(["cpu"])
    hash(settings)
    choose()
    chosen = algorithms_in_force()
    assert not settings.is_current()
    with settings.restored():
        assert alike(algorithms_in_force(), before)
    assert algorithms_in_force() == chosen != before


def alike(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Precisions that nobody has set are the full ones."""
    return str(some).replace("none", "ieee") == str(others).replace("none", "ieee")


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(4)))


def gradients(module: nn.Module, x: Tensor) -> list[Any]:
    """Of a forward without oneDNN and a backward with it."""
    mkldnn.set_flags(False)
    loss = module(x).pow(2).sum()
    mkldnn.set_flags(True)
    loss.backward()
    return [p.grad for p in module.parameters()]


@pytest.mark.slow
def test_a_forward_without_onednn_is_run_again_without_it() -> None:
    x, ours = torch.randn(4, 8, 16, 16), convolutions()
    plain = copy.deepcopy(ours)
    assert rematerialize(ours, x, memory_budget="85%").num_recomputed
    for _ in range(3):
        found, wanted = gradients(ours, x), gradients(plain, x)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_precision_that_is_set_by_its_own_name_hinders_nothing(when: str) -> None:
    x, ours = torch.randn(4, 8, 16, 16), convolutions()
    plain = copy.deepcopy(ours)
    if when == "before":
        cuda.matmul.fp32_precision = "tf32"
    assert rematerialize(ours, x, memory_budget="85%").num_recomputed
    cuda.matmul.fp32_precision = "tf32"
    for module in (ours, plain):
        module(x).sum().backward()
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    assert all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)
