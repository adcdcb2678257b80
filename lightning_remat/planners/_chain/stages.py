"""A graph cut into a chain of stages at its articulation points, where a single storage crosses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ...chain import Chain, Stage
from ...lowering import keep_everything, lower_kept
from ...schedules.graph import Graph, Node
from ...schedules.simulator import simulate
from ...schedules.uses import saved_roots

_SOURCE = "source"


@dataclass(frozen=True, slots=True)
class GraphStage:
    """The nodes `start` to `stop - 1` of a graph, between two articulation points.

    Attributes:
        start: First node.
        stop: One after the last.
        entry: The nodes of the stage before that this one reads, all of one storage.
        exit: The nodes of this stage that the next one reads, all of one storage.
        saved: The nodes of this stage whose output its own backward reads.
        taped: The nodes of this stage with a tape.
    """

    start: int
    stop: int
    entry: tuple[int, ...]
    exit: tuple[int, ...]
    saved: frozenset[int]
    taped: frozenset[int]

    @property
    def nodes(self) -> range:
        """The stage's nodes."""
        return range(self.start, self.stop)

    @property
    def kept(self) -> frozenset[int]:
        """The nodes whose output the stage's tape (the paper's abar) holds, the exit included."""
        return self.saved | frozenset(self.exit)

    @property
    def reuses_exit(self) -> bool:
        """Whether an exit that is there still is of use to the stage's own recomputation: it need not be run again."""
        return not self.taped.intersection(self.exit)


class StageFigures(NamedTuple):
    """What a stage costs by the simulator's rules; its input's bytes are in none of the figures but `drop_peak_bytes`.

    Attributes:
        output_bytes: The exit's storage.
        gradient_bytes: The gradient of the exit.
        tape_bytes: What stays after a run that keeps all that the backward reads, the exit included.
        keep_peak_bytes: The most during a run that keeps the input and the exit alone.
        drop_peak_bytes: The most during a run that drops the input after its last use, the input included.
        fall_peak_bytes: The most during a run that keeps all that the backward reads.
        leaf_peak_bytes: The most during a backward with its recomputation, the exit's gradient left out.
        kept_leaf_peak_bytes: The same where the exit is there still, kept for the next stage's backward.
        back_peak_bytes: The most during the backward.
        parameter_bytes: Gradients that stay after the backward.
        forward_seconds: A run of all nodes.
        leaf_seconds: A recomputation right before the backward, of what that needs.
        kept_leaf_seconds: The same where the exit is there still.
        backward_seconds: The backward.
    """

    output_bytes: int
    gradient_bytes: int
    tape_bytes: int
    keep_peak_bytes: int
    drop_peak_bytes: int
    fall_peak_bytes: int
    leaf_peak_bytes: int
    kept_leaf_peak_bytes: int
    back_peak_bytes: int
    parameter_bytes: int
    forward_seconds: float
    leaf_seconds: float
    kept_leaf_seconds: float
    backward_seconds: float


def cut_stages(graph: Graph) -> tuple[GraphStage, ...]:
    """The finest chain of stages of `graph` that are worth being stages.

    A cut lies where the values that later nodes read (or save) live in at most one storage, and some backward reads
    that storage: one that no backward reads is not held by plain autograd, and keeping it is never better than keeping
    its neighbour. Of several cuts at which the same storage crosses the first counts.

    Args:
        graph: The operations, at least one.

    Returns:
        Stages that partition the nodes in order.

    Reference:
        Beaumont et al. 2024, section 3.1 (a stage is an arbitrary graph of operations).
    """
    last_use: dict[int, int] = {}
    readers: list[list[int]] = [[] for _ in graph.nodes]
    saved = saved_roots(graph)
    for n, node in enumerate(graph.nodes):
        for i in {*graph.reads[n], *node.saved} - {n}:
            readers[i].append(n)
            last_use[graph.roots[i]] = n
    crossing: set[int] = set()
    ends: list[int] = []
    previous = -1
    for n in range(len(graph.nodes) - 1):
        crossing = {r for r in {*crossing, graph.roots[n]} if last_use.get(r, -1) > n}
        root = next(iter(crossing), -1)
        if len(crossing) <= 1 and (root == -1 or (root != previous and root in saved)):
            ends.append(n + 1)
            previous = root
    bounds = [0, *ends, len(graph.nodes)]
    exits = [tuple(i for i in range(a, b) if any(u >= b for u in readers[i])) for a, b in pairwise(bounds)]
    stages: list[GraphStage] = []
    for k, (a, b) in enumerate(pairwise(bounds)):
        own = [graph.nodes[n] for n in range(a, b)]
        own_saved = frozenset(i for node in own for i in node.saved if i >= a)
        taped = frozenset(n for n in range(a, b) if graph.nodes[n].tape_bytes)
        stages.append(GraphStage(a, b, exits[k - 1] if k else (), exits[k], own_saved, taped))
    return tuple(stages)


def stage_figures(graph: Graph, stage: GraphStage) -> StageFigures:
    """The figures of one stage, from replays of the stage alone between a source and a sink."""
    size = graph.nodes[graph.roots[stage.entry[0]]].output_bytes if stage.entry else 0
    alone, first = _alone(graph, stage, input_bytes=size)

    def moved(nodes: Iterable[int]) -> frozenset[int]:
        return frozenset(n - stage.start + first for n in nodes)

    # The caller holds the graph's outputs, so that keeping them is free.
    held = moved(n for n in graph.outputs if n in stage.nodes)
    own = range(first, first + len(stage.nodes))
    return _figures(alone, own, moved(stage.exit), moved(stage.kept), held, reuses_exit=stage.reuses_exit)


@lru_cache(maxsize=256)
def _figures(
    loaded: Graph, own: range, exits: frozenset[int], kept: frozenset[int], held: frozenset[int], *, reuses_exit: bool
) -> StageFigures:
    """The figures of the nodes `own` of a stage alone; equal blocks of a network share them."""
    first, nodes = own.start, loaded.nodes
    source = held.union(range(first))
    without_input = (replace(n, output_bytes=0) if n.name == _SOURCE else n for n in nodes)
    free = replace(loaded, nodes=tuple(without_input))

    everything = keep_everything(free)
    plain = simulate(free, everything)
    moves = list(zip(everything.actions, plain.memory_bytes, strict=True))
    fall_peak = max(m for a, m in moves if a.kind == "F" and a.node in own)
    back_peak = max(m for a, m in moves if a.kind == "B" and a.node in own)

    gradient = sum(loaded.gradient_bytes(n) for n in exits)
    leaf_peak, leaf_seconds = _recomputation(free, source, own, gradient)
    kept_leaf_peak, kept_leaf_seconds = leaf_peak, leaf_seconds
    if reuses_exit:
        kept_leaf_peak, kept_leaf_seconds = _recomputation(free, source | exits, own, gradient)

    forward_seconds = sum(nodes[n].forward_seconds for n in own)
    return StageFigures(
        output_bytes=_bytes_of_roots(loaded, exits),
        gradient_bytes=gradient,
        tape_bytes=_bytes_of_roots(loaded, kept) + sum(nodes[n].tape_bytes for n in own),
        keep_peak_bytes=_first_runs(free, source | exits, own),
        drop_peak_bytes=_first_runs(loaded, exits | held, own),
        fall_peak_bytes=fall_peak,
        leaf_peak_bytes=leaf_peak,
        kept_leaf_peak_bytes=kept_leaf_peak,
        back_peak_bytes=back_peak,
        parameter_bytes=sum(nodes[n].parameter_bytes + nodes[n].input_gradient_bytes for n in own),
        forward_seconds=forward_seconds,
        leaf_seconds=leaf_seconds,
        kept_leaf_seconds=kept_leaf_seconds,
        backward_seconds=plain.seconds - forward_seconds,
    )


def _bytes_of_roots(graph: Graph, nodes: Iterable[int]) -> int:
    return sum(graph.nodes[r].output_bytes for r in {graph.roots[n] for n in nodes})


def to_chain(figures: tuple[StageFigures, ...]) -> Chain:
    """The chain of beaumont2024 with the figures of a graph's stages; the last stage stands for the loss.

    Its model is cruder: one overhead for all three forward operations, gradients as large as activations.
    """
    stages: list[Stage] = []
    before = 0
    for f in figures:
        forward = max(f.keep_peak_bytes - f.output_bytes, f.fall_peak_bytes - f.tape_bytes, 0)
        backward = max(f.back_peak_bytes - f.output_bytes - before - f.tape_bytes, 0)
        stages.append(Stage(f.output_bytes, f.tape_bytes, f.forward_seconds, f.backward_seconds, forward, backward))
        before = f.output_bytes
    return Chain(0, tuple(stages))


def _alone(graph: Graph, stage: GraphStage, *, input_bytes: int) -> tuple[Graph, int]:
    """The stage as a graph: a source of `input_bytes` and the views of it that the stage reads, its nodes, a sink."""
    place: dict[int, int] = {}
    nodes: list[Node] = []
    if stage.entry:
        root = graph.roots[stage.entry[0]]
        gradient = graph.gradient_bytes(root) if root in stage.entry else 0
        nodes.append(Node(_SOURCE, output_bytes=input_bytes, gradient_bytes=gradient))
        place[root] = 0
        for i in stage.entry:
            if i != root:
                place[i] = len(nodes)
                gradient = graph.gradient_bytes(i)
                nodes.append(Node(f"view {len(nodes)}", inputs=(0,), storage_of=0, gradient_bytes=gradient))
    first = len(nodes)
    for n in stage.nodes:
        place[n] = len(nodes)
        node = graph.nodes[n]
        base = node.storage_of
        nodes.append(
            replace(
                node,
                name=f"{len(nodes)}",  # that of the network would tell equal blocks apart
                inputs=tuple(place[i] for i in node.inputs),
                saved=tuple(place[i] for i in node.saved),
                held=tuple(place[i] for i in node.held),
                storage_of=None if base is None else place.get(base, 0),
                gradient_bytes=graph.gradient_bytes(n),
                shares_gradient=tuple(place[i] for i in graph.shares_gradient(n) if i in place),
            )
        )
    outputs = tuple(place[n] for n in graph.outputs if n in stage.nodes)
    if stage.exit:
        # Where the graph names no outputs, gradients come to whatever has no user: the sink among them.
        outputs = (*outputs, len(nodes)) if graph.outputs else ()
        nodes.append(Node("sink", inputs=tuple(place[n] for n in stage.exit), gradient_bytes=1))
    return Graph(tuple(nodes), outputs=outputs), first


def _recomputation(alone: Graph, outputs: frozenset[int], own: range, gradient_bytes: int) -> tuple[int, float]:
    """The most memory, but for the exit's gradient, and the seconds of what is run again when `outputs` are kept."""
    schedule = lower_kept(alone, outputs, ())
    simulation = simulate(alone, schedule)
    moves = list(zip(schedule.actions, simulation.memory_bytes, strict=True))
    turn = next(i for i, (action, _) in enumerate(moves) if action.kind == "B")
    most = max(used for action, used in moves[turn:] if action.kind in "FB" and action.node in own)
    return max(most - gradient_bytes, 0), simulation.recompute_seconds


def _first_runs(alone: Graph, outputs: frozenset[int], own: range) -> int:
    """The most memory during the first runs of `own` nodes when `outputs` are kept."""
    schedule = lower_kept(alone, outputs, ())
    first: dict[int, int] = {}
    for (kind, n), used in zip(schedule, simulate(alone, schedule).memory_bytes, strict=True):
        if kind == "F":
            first.setdefault(n, used)
    return max(first[n] for n in own)
