"""One process alone for test_resident_memory.py: prints what is predicted of a step, without and with scratch, and it.

In the process of the other tests the heap is full of holes; what fills them meanwhile would count as the step's.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn

from lightning_remat import profile, simulate, trace
from lightning_remat.lowering import lower_kept
from lightning_remat.measure.meter import measure_peak
from lightning_remat.schedules.graph import Graph


def predicted(graph: Graph) -> int:
    return simulate(graph, lower_kept(graph, range(len(graph.nodes)))).peak_bytes


def measured(net: nn.Module, x: Tensor) -> int:
    net.zero_grad()
    with measure_peak(include=[net, x], with_scratch=True) as step:
        net(x).sum().backward()
    return step.peak_bytes


def main() -> None:
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 3))
    x = torch.randn(80, 3, 64, 64)  # malloc hands tensors of more than 32 MiB back at once
    traced = trace(net, x)
    bare, full = profile(traced, x, with_kernels=False), profile(traced, x, with_scratch=True)
    assert full.nodes[2].forward_workspace_bytes > bare.nodes[2].forward_workspace_bytes
    measured(net, x)  # the kernels' code is made
    print(json.dumps({"bare": predicted(bare), "full": predicted(full), "measured": measured(net, x)}))


if __name__ == "__main__":  # pytest imports every file that may hold examples
    main()
