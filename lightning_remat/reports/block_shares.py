"""What a plan keeps and recomputes, module by module, and what that buys and costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..plans.plan import Plan
from .blocks import blocks


@dataclass(frozen=True, slots=True)
class BlockShare:
    """A module's part in a plan.

    Attributes:
        name: The module.
        kept_bytes: Of what the backward reads: what stays from the first run to its backward.
        kept_seconds: Forward of the operations that made it, which a recomputation would take at least.
        recomputed_bytes: Of what the backward reads: what goes in between and is made again.
        recomputed_seconds: What making it again takes.
        recomputed_kinds: Operations that run again, by kind.
    """

    name: str
    kept_bytes: int
    kept_seconds: float
    recomputed_bytes: int
    recomputed_seconds: float
    recomputed_kinds: dict[str, int]


def block_shares(plan: Plan) -> list[BlockShare]:
    """Every module's part, in the order in which they run."""
    graph = plan.graph
    runs = plan.schedule.runs()
    read = {graph.roots[i] for node in graph.nodes for i in node.saved}
    names, block_of = blocks([node.name for node in graph.nodes])
    shares: list[BlockShare] = []
    for number, name in enumerate(names):
        again = Counter[str]()
        kept_bytes = again_bytes = 0
        kept_seconds = again_seconds = 0.0
        for n, node in enumerate(graph.nodes):
            if block_of[n] != number:
                continue
            size = (node.output_bytes if n in read else 0) + node.tape_bytes
            if runs[n] > 1:
                again[node.kind] += 1
                again_bytes += size
                again_seconds += node.rerun_seconds * (runs[n] - 1)
            elif size:
                kept_bytes += size
                kept_seconds += node.forward_seconds
        shares.append(BlockShare(name, kept_bytes, kept_seconds, again_bytes, again_seconds, dict(again)))
    return shares


def prices(shares: Sequence[BlockShare]) -> str:
    """Why this is kept and that recomputed, in a sentence: what a GiB of either costs."""
    again_bytes, again_seconds = sum(s.recomputed_bytes for s in shares), sum(s.recomputed_seconds for s in shares)
    kept_bytes, kept_seconds = sum(s.kept_bytes for s in shares), sum(s.kept_seconds for s in shares)
    if not again_bytes:
        return "Everything fits, so nothing is recomputed."
    paid = f"A GiB that is recomputed costs {_per_gib(again_seconds, again_bytes)} a step on average"
    if not kept_bytes:
        return f"{paid}; nothing that can be recomputed is kept."
    return f"{paid}; a GiB that is kept would cost {_per_gib(kept_seconds, kept_bytes)} or more."


def _per_gib(seconds: float, count: int) -> str:
    price = seconds / (count / 2**30)
    return f"{price:.2f} s" if price >= 1 else f"{price * 1e3:.3g} ms"
