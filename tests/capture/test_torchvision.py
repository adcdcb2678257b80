"""The networks of torchvision: exact in every bit at small size, exact in bytes at paper size on fake tensors."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from training_steps import assert_equal_traces, step_peak, traces

from lightning_remat import InfeasibleBudgetError, Plan, plan, profile, rematerialize, restore, trace

# What kernels of convolutions take depends on how many threads run them, and with it what VGG can save.
pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = (
    "resnet18",
    "resnet50",
    "densenet121",
    "googlenet",
    "inception_v3",
    "vgg19",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "regnet_y_400mf",
    "shufflenet_v2_x1_0",
    "squeezenet1_1",
    "convnext_tiny",
    "deeplabv3_resnet50",
)
QUICK = ("resnet18", "squeezenet1_1")


def build(name: str) -> nn.Module:
    """An untrained network; nothing is downloaded."""
    if name.startswith("deeplab"):
        return torchvision.models.segmentation.__dict__[name](weights=None, weights_backbone=None)
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return torchvision.models.__dict__[name](weights=None, **options)


def marked(names: tuple[str, ...]) -> list[object]:
    return [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in names]


def planned_at(graph: object, fraction: float, planner: str) -> Plan:
    """The plan at a fraction of the plain peak, or at the planner's floor where that is higher."""
    whole = plan(graph, 1 << 62, "keep_all").peak_bytes
    try:
        return plan(graph, int(fraction * whole), planner)
    except InfeasibleBudgetError as error:
        return plan(graph, int(error.minimum_bytes), planner)


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(NAMES))
def test_three_training_steps_are_bitwise_equal(name: str) -> None:
    torch.manual_seed(0)
    plain = build(name)
    ours = copy.deepcopy(plain)
    size = 299 if name == "inception_v3" else 64
    batches = [torch.randn(2, 3, size, size) for _ in range(3)]
    before = copy.deepcopy(ours.state_dict())
    random_state = torch.get_rng_state()
    graph = profile(trace(ours, batches[0]), batches[0], repeats=1)
    made = planned_at(graph, 0.6, "chen_cheap")
    assert made.num_recomputed > 0
    rematerialize(ours, batches[0], plan=made)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert ours.state_dict().keys() == before.keys()
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), before.values(), strict=True))
    assert_equal_traces(traces(plain, batches), traces(ours, batches))


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(NAMES))
def test_predicted_peaks_are_measured_at_paper_size(name: str) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        module = copy.deepcopy(build(name))
    with mode:
        size = 299 if name == "inception_v3" else 224
        x = torch.randn(32, 3, size, size)
        graph = profile(trace(module, x), x)
        whole = plan(graph, 1 << 62, "keep_all")
        assert step_peak(module, x) == pytest.approx(whole.peak_bytes, rel=0.01)
        for fraction in (0.6, 0.0):
            made = planned_at(graph, fraction, "periodic")
            rematerialize(module, x, plan=made)
            measured = step_peak(module, x)
            assert measured <= 1.0001 * made.budget_bytes
            assert measured == pytest.approx(made.peak_bytes, rel=0.01)
            restore(module)
