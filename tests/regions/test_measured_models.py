"""Models of libraries, tiny: exact, within the budget, and with the peak that is predicted, plain and planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import ATTENTION, JAMBA, MARKS, Case, language_model
from torch import Tensor, nn
from training_steps import output_tensors

from benchmarks.peaks import LOSS_BYTES, measured_peak
from lightning_remat import InfeasibleBudgetError, rematerialize, restore

pytestmark = MARKS

TOKENS = torch.arange(64).reshape(2, 32) % 97
ONES = torch.ones_like(TOKENS)
PADDED = ONES.index_fill(1, torch.arange(20, 32), 0)


def unet() -> Case:
    nets: Any = pytest.importorskip("monai.networks.nets")
    sizes = {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 2, "dropout": 0.1}
    return nets.UNet(spatial_dims=2, in_channels=1, out_channels=2, **sizes), {"x": torch.randn(2, 1, 64, 64)}


def swin_unetr() -> Case:
    pytest.importorskip("einops")
    nets: Any = pytest.importorskip("monai.networks.nets")
    sizes = {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2)}
    model = nets.SwinUNETR(in_channels=1, out_channels=2, spatial_dims=2, **sizes)
    return model, {"x_in": torch.randn(1, 1, 64, 64)}


def trained(kind: str, *, mask: Tensor | None = None, **sizes: Any) -> Case:
    masked = {} if mask is None else {"attention_mask": mask}
    return language_model(kind, **sizes), {"input_ids": TOKENS, "labels": TOKENS, **masked}


CASES: dict[str, Callable[[], Case]] = {
    "monai unet": unet,
    "monai swin unetr": swin_unetr,
    "mamba": lambda: trained("mamba", state_size=4),
    "jamba": lambda: trained("jamba", **JAMBA),
    "llama with a mask of ones": lambda: trained("llama", mask=ONES, **ATTENTION),
    "llama with padding": lambda: trained("llama", mask=PADDED, **ATTENTION),
}


def step(module: nn.Module, kwargs: dict[str, Any], state: dict[str, Any]) -> list[Tensor]:
    """Outputs, gradients, buffers and random state of a step from a state of the module."""
    module.load_state_dict(state)
    torch.manual_seed(3)
    module.zero_grad()
    outputs = output_tensors(module(**kwargs))
    torch.stack([t.square().mean() for t in outputs]).sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [*(t.detach() for t in outputs), *gradients, *(b.clone() for b in module.buffers()), torch.get_rng_state()]


@pytest.mark.parametrize("case", CASES)
def test_a_model_trains_exactly_and_as_predicted(case: str) -> None:
    torch.manual_seed(0)
    module, kwargs = CASES[case]()
    module.train()
    state = {name: t.clone() for name, t in module.state_dict().items()}
    measured_peak(module, **kwargs)  # the first step may make what others find
    plain, plain_peak = step(module, kwargs, state), measured_peak(module, **kwargs) - LOSS_BYTES
    with pytest.raises(InfeasibleBudgetError) as caught:
        rematerialize(module, memory_budget=1, planner="periodic", **kwargs)
    least = int(caught.value.minimum_bytes)
    for budget in (least, max(least, (least + plain_peak) // 2)):
        plan = rematerialize(module, memory_budget=budget, planner="periodic", **kwargs)
        assert plan.num_recomputed
        assert plan.plain.peak_bytes == pytest.approx(plain_peak, rel=0.01)
        ours = step(module, kwargs, state)
        assert len(ours) == len(plain)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
        measured = measured_peak(module, **kwargs) - LOSS_BYTES
        assert measured == pytest.approx(plan.peak_bytes, rel=0.01)
        assert measured <= budget
        restore(module)
