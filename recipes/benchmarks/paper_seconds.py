"""Seconds of every operation of the papers' networks, measured once on the CPU and kept, so that plans are repeatable.

python recipes/benchmarks/paper_seconds.py [resnet50 unet …]    measures and writes results/paper_seconds.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.paper_scale import NETWORKS, PaperNetwork
from lightning_remat import Graph

FILE = Path(__file__).resolve().parents[1] / "results" / "paper_seconds.json"


def with_measured_seconds(network: str, graph: Graph) -> Graph:
    """The graph with the seconds in the file, scaled from the small batch to the network's batch size.

    Raises:
        ValueError: The network was not measured, or has other operations since.
    """
    measured = json.loads(FILE.read_text()) if FILE.exists() else {}
    rows = measured.get(network, [])
    if len(rows) != len(graph.nodes):
        raise ValueError(
            f"{FILE.name} has seconds of {len(rows)} operations of {network}, which has {len(graph.nodes)}: "
            f"measure them with python recipes/benchmarks/paper_seconds.py {network}"
        )
    scale = NETWORKS[network].batch_size / NETWORKS[network].small_batch_size * 1e-6
    nodes = tuple(
        replace(node, forward_seconds=forward * scale, backward_seconds=backward * scale)
        for node, (forward, backward) in zip(graph.nodes, rows, strict=True)
    )
    return replace(graph, nodes=nodes)


def measure(network: PaperNetwork) -> list[tuple[float, float]]:
    """Microseconds of forward and backward of every operation at the small batch, on one thread.

    The clock is that thread's CPU time, which other programs on the machine do not disturb.
    """
    torch.set_num_threads(1)
    with mock.patch("lightning_remat.measure.stopwatch.time.perf_counter", time.thread_time):
        graph = network.profiled(network.small_batch_size)
    return [(round(n.forward_seconds * 1e6, 2), round(n.backward_seconds * 1e6, 2)) for n in graph.nodes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    for name in parser.parse_args().networks:
        found = measure(NETWORKS[name])
        kept = json.loads(FILE.read_text()) if FILE.exists() else {}
        FILE.write_text(
            "{\n"
            + ",\n".join(
                f"{json.dumps(key)}: {json.dumps(rows)}" for key, rows in sorted((kept | {name: found}).items())
            )
            + "\n}\n"
        )
        forward, backward = (sum(row[k] for row in found) / 1e6 for k in (0, 1))
        print(f"{name}: {len(found)} operations, forward {forward:.3f} s, backward {backward:.3f} s", flush=True)


if __name__ == "__main__":
    main()
