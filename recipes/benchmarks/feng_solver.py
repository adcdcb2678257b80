"""Feng's solver on the networks of the paper's Table 2: the paper's seconds and memory cut-off beside ours.

    python recipes/benchmarks/feng_solver.py

Vertices are fewer here where an operation works in place. The cut-off is the paper's theoretical one: equation (1)
against the sum of all vertices, so that the solver's answer is compared and not a schedule of ours. DenseNet comes
twice: torchvision joins the whole list of features before each layer, a mesh whose corners must all be stored; the
version of the paper's time joined the last result and the newest feature, which is a series.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision import models

from lightning_remat import profile, trace
from lightning_remat.planners.feng import solve, storage_problem

# Table 2 of feng2018: vertices, seconds, theoretical memory cut-off in percent.
PUBLISHED = {
    "alexnet": (12, 0.03, 42),
    "vgg11": (17, 0.09, 50),
    "vgg19": (25, 0.44, 53),
    "resnet18": (51, 0.09, 63),
    "resnet50": (125, 1.27, 75),
    "resnet152": (363, 59.34, 84),
    "densenet121": (306, 293.75, 81),
    "densenet161": (406, 1537.82, 84),
    "densenet169": (426, 2356.47, 82),
    "densenet201": (506, 7335.35, 86),
    "inception_v3": (219, 7.68, 76),
}


def pairwise(edges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The edges with each concatenation that extends an earlier one by one vertex reading that one and the vertex."""
    inputs: dict[int, frozenset[int]] = {}
    for a, b in edges:
        inputs[b] = inputs.get(b, frozenset()) | {a}
    made: dict[frozenset[int], int] = {}
    found: list[tuple[int, int]] = []
    for v in sorted(inputs):
        newest = max(inputs[v])
        earlier = made.get(inputs[v] - {newest})
        made[inputs[v]] = v
        found += [(a, v) for a in (inputs[v] if earlier is None else (earlier, newest))]
    return found


def main() -> None:
    """Prints the table."""
    solve([1, 1, 1], [(0, 1), (1, 2)])  # compiles the kernel
    table = Table("network", "vertices", "paper's", "seconds", "paper's", "cut-off %", "paper's", title="Feng & Huang")
    for name, (num_vertices, seconds, cut) in PUBLISHED.items():
        options: dict[str, Any] = {"init_weights": False, "aux_logits": False} if name == "inception_v3" else {}
        size = 300 if name == "inception_v3" else 224
        with FakeTensorMode(allow_non_fake_inputs=True):
            module, batch = getattr(models, name)(**options), torch.randn(1, 3, size, size)
            costs, edges, _ = storage_problem(profile(trace(module, batch), batch))
        versions = {name: edges}
        if name.startswith("densenet"):
            versions[f"{name}, pairwise"] = pairwise(edges)
        for version, lines in versions.items():
            start = time.perf_counter()
            found = solve(costs, lines)
            taken = time.perf_counter() - start
            ours = 100 * (1 - found.cost / sum(costs))
            figures = f"{taken:.2f}", f"{seconds:.2f}", f"{ours:.0f}", str(cut)
            table.add_row(version, str(len(costs)), str(num_vertices), *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
