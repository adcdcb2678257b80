"""How each architecture is captured, and whether a training step stays bitwise equal: one row each.

python recipes/benchmarks/architectures.py [resnet50 swin_t timm:resnet26 …]

Without names: one member of every torchvision classification and segmentation family. `timm:NAME` takes a
network of timm, where that is installed. Weights are never downloaded.
"""

from __future__ import annotations

import argparse
import copy
import importlib

import torch
import torchvision
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_remat import InfeasibleBudgetError, Plan, TraceError, plan, profile, rematerialize, trace

FAMILIES = (
    "alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet1_0 "
    "mobilenet_v2 mobilenet_v3_small regnet_y_400mf resnet18 resnext50_32x4d wide_resnet50_2 shufflenet_v2_x1_0 "
    "squeezenet1_1 swin_t swin_v2_t vgg11_bn vit_b_16 deeplabv3_resnet50 fcn_resnet50 lraspp_mobilenet_v3_large"
)


def build(name: str) -> nn.Module:
    """The untrained network of that name."""
    if name.startswith("timm:"):
        return importlib.import_module("timm").create_model(name.removeprefix("timm:"), pretrained=False)
    options = {"weights_backbone": None} if name in torchvision.models.segmentation.__dict__ else {}
    options |= {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return torchvision.models.get_model(name, weights=None, **options)


def step(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs, gradients, buffers and random state of one training step."""
    torch.manual_seed(1)
    module.zero_grad()
    outputs = [t for t in tree_leaves(module(x)) if isinstance(t, Tensor)]
    torch.stack([t.square().mean() for t in outputs]).sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [*(t.detach() for t in outputs), *gradients, *module.buffers(), torch.get_rng_state()]


def plan_at_half(module: nn.Module, x: Tensor, planner: str) -> Plan:
    """The plan for half the plain peak, or for the planner's lowest peak."""
    graph = profile(trace(module, x), x, repeats=1)
    whole = plan(graph, 1 << 62, "keep_all").peak_bytes
    try:
        return plan(graph, whole // 2, planner)
    except InfeasibleBudgetError as error:
        return plan(graph, int(error.minimum_bytes), planner)


def row(name: str, planner: str) -> str:
    """One line of the table."""
    plain = build(name)
    ours = copy.deepcopy(plain)
    size = 299 if name == "inception_v3" else 224 if name.startswith(("maxvit", "vit", "swin", "timm")) else 96
    x = torch.randn(2, 3, size, size)
    try:
        made = plan_at_half(ours, x, planner)
    except TraceError as error:
        return f"| {name} | left alone: {error} | | | |"
    rematerialize(ours, x, plan=made)
    is_equal = all(torch.equal(a, b) for a, b in zip(step(plain, x), step(ours, x), strict=True))
    modules = dict(plain.named_modules())
    opaque = [
        n.name
        for n in made.graph.nodes
        if n.name in modules and not type(modules[n.name]).__module__.startswith("torch.nn")
    ]
    rung = f"traced, {len(opaque)} opaque" if opaque else "traced"
    reduction = 1 - made.peak_bytes / made.plain.peak_bytes
    return f"| {name} | {rung} | {len(made.graph.nodes)} | {'yes' if is_equal else 'NO'} | {reduction:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=FAMILIES.split())
    parser.add_argument("--planner", default="chen_cheap")
    arguments = parser.parse_args()
    print("| network | capture | nodes | bitwise equal | peak reduction |\n|---|---|---|---|---|")
    for name in arguments.names:
        print(row(name, arguments.planner), flush=True)


if __name__ == "__main__":
    main()
