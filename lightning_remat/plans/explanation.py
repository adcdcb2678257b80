"""Says in words what a plan does, how far it is from the bounds, and what more memory would buy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..budget import format_bytes
from ..planners._auto.front_search import front_of
from ..schedules.floor import Floor, find_floor
from ..schedules.graph import Graph
from ..schedules.simulator import simulate
from ..schedules.time_bound import least_recompute_seconds
from ..schedules.uses import saved_roots
from .plan import Plan


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is worth knowing about a plan.

    Attributes:
        plan: The plan.
        floor: The peak below which no schedule of whole operations can go, and the action that sets it.
        lowest_bytes: The lowest peak that `auto` reaches.
        least_seconds: Recomputation that no schedule within the budget avoids (a lower bound).
        more_bytes: By how much a larger budget is valued.
        saved_seconds: What `more_bytes` more would save a step.
        knee_bytes: The budget at the knee of the trade-off, where giving up memory starts to cost much more time.
        knee_overhead: Recomputation there, as a fraction of the plain step.
        decisions: What is kept and what is recomputed, a sentence each.
    """

    plan: Plan
    floor: Floor
    lowest_bytes: int
    least_seconds: float
    more_bytes: int
    saved_seconds: float
    knee_bytes: int
    knee_overhead: float
    decisions: tuple[str, ...]

    @property
    def gap(self) -> float:
        """By how much of the plain step the plan's recomputation may exceed the optimum, at most."""
        recomputed = self.plan.simulation.recompute_seconds
        return max(0.0, recomputed - self.least_seconds) / max(self.plan.plain.seconds, 1e-12)

    @property
    def text(self) -> str:
        """The explanation as a paragraph of lines."""
        plan, floor = self.plan, self.floor
        step = max(plan.plain.seconds, 1e-12)
        return "\n".join(
            [
                f"{plan.planner}: {plan.memory_text}, "
                f"+{_time(plan.simulation.recompute_seconds)}, {plan.recompute_overhead:.1%} of a step",
                *self.decisions,
                f"at most {self.gap:.1%} of a step above the optimum (no schedule here recomputes less than "
                f"{_time(self.least_seconds)})",
                f"{format_bytes(self.more_bytes)} more would save {_time(self.saved_seconds)} a step "
                f"({self.saved_seconds / step:.1%})",
                f"knee of the trade-off: {format_bytes(self.knee_bytes)} at +{self.knee_overhead:.1%}",
                f"no schedule fits under {format_bytes(floor.bytes)}: {floor.phase} of "
                f"{plan.graph.nodes[floor.node].name}; the lowest found is {format_bytes(self.lowest_bytes)}",
            ]
        )

    def __str__(self) -> str:
        return self.text


def explain(plan: Plan, *, more_bytes: int | None = None, effort: float = 1.0) -> Explanation:
    """What a plan keeps and recomputes, its distance from the bounds, and the value of more memory.

    The trade-off is that of `auto`, whichever planner made the plan; it is at hand after `auto` has planned the
    graph and takes its planning time otherwise.

    Args:
        plan: Any plan.
        more_bytes: The addition to the budget to value; a tenth of the plain peak where None.
        effort: Of the search of `auto`.

    Raises:
        ValueError: The plan has no operations.
    """
    if not plan.graph.nodes:
        raise ValueError("a plan of no operations has nothing to explain")
    graph = plan.graph.with_reruns_priced()
    front = front_of(graph, effort)
    more = max(1, plan.plain.peak_bytes // 10) if more_bytes is None else more_bytes
    later = front.within(plan.budget_bytes + more)
    seconds = simulate(graph, plan.schedule).seconds
    saved = 0.0 if later is None else max(0.0, seconds - front.seconds[later])
    knee = _knee(front.peaks, front.seconds)
    return Explanation(
        plan=plan,
        floor=find_floor(graph),
        lowest_bytes=front.peaks[0],
        least_seconds=least_recompute_seconds(graph, plan.budget_bytes),
        more_bytes=more,
        saved_seconds=saved,
        knee_bytes=front.peaks[knee],
        knee_overhead=(front.seconds[knee] - front.seconds[-1]) / max(plan.plain.seconds, 1e-12),
        decisions=tuple(_decisions(plan)),
    )


def _knee(peaks: list[int], seconds: list[float]) -> int:
    """The state farthest below the line between the ends of the front, both axes taken from 0 to 1."""
    wide, high = max(1, peaks[-1] - peaks[0]), max(seconds[0] - seconds[-1], 1e-12)
    return max(
        range(len(peaks)),
        key=lambda k: (1 - (peaks[k] - peaks[0]) / wide) - (seconds[k] - seconds[-1]) / high,
    )


def _decisions(plan: Plan) -> list[str]:
    """Sentences on what is kept, recomputed and recomputed repeatedly, by kind of operation."""
    graph = plan.graph
    runs = plan.schedule.runs()
    seconds: dict[str, float] = {}
    again: dict[str, list[int]] = {}
    kept: Counter[str] = Counter()
    needed = saved_roots(graph)
    for n, node in enumerate(graph.nodes):
        if runs[n] > 1:
            again.setdefault(node.kind, []).append(n)
            seconds[node.kind] = seconds.get(node.kind, 0.0) + node.rerun_seconds * (runs[n] - 1)
        elif (n in needed and not node.is_view) or node.tape_bytes:
            kept[node.kind] += 1
    if not again:
        return ["keeps everything, recomputes nothing"]
    sentences: list[str] = []
    whole = [f"{kind} ({number})" for kind, number in kept.most_common() if kind not in again]
    if whole:
        sentences.append(f"keeps every {_listed(whole)}")
    for kind in sorted(seconds, key=lambda kind: -seconds[kind]):
        if not seconds[kind]:
            continue
        total = sum(node.kind == kind for node in graph.nodes)
        where = "everywhere" if len(again[kind]) == total else f"in {_listed(_places(graph, again[kind]))}"
        sentences.append(f"recomputes {len(again[kind])} of {total} {kind} {where}: +{_time(seconds[kind])}")
    repeated = [n for n in runs if runs[n] > 2]
    if repeated:
        most = max(runs[n] - 1 for n in repeated)
        sentences.append(f"recomputes {len(repeated)} operations more than once, up to {most} times")
    return sentences


def _places(graph: Graph, nodes: list[int]) -> list[str]:
    """The outermost modules that hold the nodes, with how many where it is not all of the kind there."""
    kind = graph.nodes[nodes[0]].kind
    depth = _depth(graph)
    inside = Counter(_module(graph.nodes[n].name, depth) for n in nodes)
    total = Counter(_module(node.name, depth) for node in graph.nodes if node.kind == kind)
    return [name if inside[name] == total[name] else f"{name} ({inside[name]} of {total[name]})" for name in inside]


def _depth(graph: Graph) -> int:
    """How many parts of a module's name tell places apart: one more than what nearly all nodes share."""
    depth = 1
    while Counter(_module(node.name, depth) for node in graph.nodes).most_common(1)[0][1] > 0.8 * len(graph.nodes):
        depth += 1
        if all(node.name.count(".") < depth for node in graph.nodes):
            break
    return depth


def _module(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth])


def _listed(words: list[str], most: int = 6) -> str:
    if len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
