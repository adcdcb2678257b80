"""A graph with its integer program, and the way from a point of the program back to schedules."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ...lowering import lower_kept
from ...schedules.gradients import gradient_levels
from ...schedules.graph import Graph
from ...schedules.schedule import Schedule
from .node_groups import coarsen, group_nodes
from .program import build_program
from .residency import lower_residency

Point = NDArray[np.float64]

_MOST_NODES = 320
_FORWARD_FREE_NODES = 40
_NODE_STAGES = 4000  # nodes times stages: a second or two for the relaxation
_LEAST_STAGES = 18


class RoundingProblem:
    """A graph with its program, and the way from a point of the program back to a schedule.

    Beyond _MOST_NODES the program is that of groups of nodes, and its stages are such that nodes times stages stay
    about constant: the program decides for every node (or group), but not anew before every backward.
    """

    def __init__(self, graph: Graph, most_stages: int | None) -> None:
        self.graph = graph
        self.groups = group_nodes(graph, _MOST_NODES)
        self.is_grouped = len(self.groups) < len(graph.nodes)
        inner, levels = graph, gradient_levels(graph)
        self.shared: list[frozenset[int]] = []
        if self.is_grouped:
            inner, levels, self.shared = coarsen(graph, self.groups)
        self.stages = group_nodes(inner, most_stages or max(_LEAST_STAGES, _NODE_STAGES // len(inner.nodes)))
        self.is_exact = not self.is_grouped and len(self.stages) == len(graph.nodes)
        is_forward_fixed = len(inner.nodes) > _FORWARD_FREE_NODES
        self.program = build_program(inner, is_forward_fixed=is_forward_fixed, stages=self.stages, levels=levels)

    def rounded(self, solution: Point) -> Schedule:
        """The schedule of an integral point."""
        outputs, tapes, stages = self._resident(solution, np.full(len(self.graph.nodes), 0.5))
        return lower_residency(self.graph, outputs, tapes, groups=stages, is_eager=self.is_exact)

    def roundings(self, solution: Point, thresholds: Point) -> Iterator[Schedule]:
        """The schedules that hold what the solution holds to at least the threshold of its node.

        The second one heeds only what is held when the backward begins, and keeps what it recomputes to its last use.
        """
        outputs, tapes, stages = self._resident(solution, thresholds)
        # The rounding may hold a view without its storage, or the other way round.
        outputs = [{n for n, root in enumerate(self.graph.roots) if root in step} for step in outputs]
        yield lower_residency(self.graph, outputs, tapes, groups=stages, is_eager=False)
        turn = len(stages) - 1
        yield lower_kept(self.graph, outputs[turn], tapes[turn])

    def _resident(self, solution: Point, thresholds: Point) -> tuple[list[set[int]], list[set[int]], list[range]]:
        """Outputs and tapes at the end of each step of `lower_residency`, and the nodes of its steps."""
        bar = thresholds[[group[0] for group in self.groups]]
        forward = [stage[-1] for stage in self.stages]
        steps = [*forward, *range(len(self.program.outputs) - len(self.stages), len(self.program.outputs))]
        outputs = [{i for i, c in self.program.outputs[s].items() if solution[c] >= bar[i]} for s in steps]
        tapes = [{i for i, c in self.program.tapes[s].items() if solution[c] >= bar[i]} for s in steps]
        stages = self.stages
        if self.is_grouped:
            stages = [range(self.groups[stage[0]].start, self.groups[stage[-1]].stop) for stage in stages]
            outputs = [self._roots(o, t) for o, t in zip(outputs, tapes, strict=True)]
            tapes = [{n for g in step for n in self.groups[g]} for step in tapes]
        return outputs, tapes, stages

    def _roots(self, outputs: set[int], tapes: set[int]) -> set[int]:
        """What the outputs and tapes of groups stand for."""
        roots = {r for g in outputs for r in self.shared[g]}
        return roots | {n for g in tapes for n in self.groups[g] if n not in self.shared[g]}
