"""Least memory with one re-forward of every segment, over the division tree of the graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..lowering import keep_everything, lower_kept
from ..schedules.compiled import Ints, njit
from ..schedules.edges import connected_parts
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ._candidates import Candidate, fastest_that_fits, trade_off
from ._division_tree import ClosedSet, divide

Numbers = NDArray[np.int64 | np.float64]  # whole where all costs are


class Reforwarding(NamedTuple):
    """A solution of the abstract problem.

    Attributes:
        stored: The vertices kept from forward to backward, source and target included, in ascending order.
        segments: The vertices of each segment that is run again; every other vertex is in exactly one.
        cost: Equation (1): the stored vertices' cost and that of the costliest segment.
    """

    stored: tuple[int, ...]
    segments: tuple[frozenset[int], ...]
    cost: float


def solve(costs: Sequence[float], edges: Iterable[tuple[int, int]]) -> Reforwarding:
    """The stored vertices of least total cost by equation (1): all that is stored, and the costliest re-forward.

    Optimal over all sets whose unstored vertices fall into connected parts with one stored source and one stored
    target each. For every possible cost m of the costliest segment the division tree is solved in linear time.

    >>> solve([1, 1, 1, 1, 1, 1, 1], [(i, i + 1) for i in range(6)])
    Reforwarding(stored=(0, 3, 6), segments=(frozenset({1, 2}), frozenset({4, 5})), cost=5)

    Args:
        costs: Memory of each vertex, in any unit.
        edges: Pairs (from, to) of a directed acyclic graph with one source and one target.

    Raises:
        ValueError: A negative cost, a cycle, several sources or targets.

    Reference: Feng & Huang 2018, equation (1), Algorithm 1 (as the series of a chain) and Algorithm 5.
    """
    problem = _problem(costs, edges)
    best: tuple[float, float] | None = None
    for term, stored, largest in _trade_off(problem):
        if best is None or stored + largest < best[0]:
            best = (stored + largest, term)
        elif stored >= best[0]:
            break  # smaller terms store even more
    assert best is not None, "there is always the term that stores nothing"
    return _solution(problem, best[1])


def plan_feng(graph: Graph, budget_bytes: int) -> Schedule:
    """The fastest schedule that fits, of those that re-forward each segment once.

    The segments come from the division tree: for each cost that the costliest segment may have, the stored set of
    least memory, from "store all" to "store the ends". Of these at most 128 are simulated, each with its last
    segment kept (whose backward follows at once) and not.

    Args:
        graph: The operations.
        budget_bytes: The true peak that must not be exceeded.

    Returns:
        A schedule whose simulated peak is within the budget.

    Raises:
        InfeasibleBudgetError: None of these schedules fits.

    Reference: Feng & Huang 2018, Algorithm 5.
    """
    return fastest_that_fits(graph, budget_bytes, _family(graph), planner="feng")


def storage_problem(graph: Graph) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Costs and edges for `solve`, and the nodes of vertices 1, 2, … between the virtual source and target.

    A vertex is a storage with its tape; the source stands for the graph's inputs, the target for the loss.
    """
    vertices = [n for n, root in enumerate(graph.roots) if root == n]
    place = {n: position for position, n in enumerate(vertices, 1)}
    target = len(vertices) + 1
    edges = {(place[graph.roots[i]], place[n]) for n in vertices for i in graph.nodes[n].inputs}
    edges |= {(0, v) for v in set(range(1, target)) - {b for _, b in edges}}
    edges |= {(v, target) for v in set(range(target)) - {a for a, _ in edges}}
    nodes = [graph.nodes[n] for n in vertices]
    return [0, *(n.output_bytes + n.tape_bytes for n in nodes), 0], sorted(edges), vertices


_MOST_CANDIDATES = 128


@lru_cache(maxsize=8)
def _family(graph: Graph) -> tuple[Candidate, ...]:
    """Depends on the graph alone, so that more budget never makes the answer slower."""
    return trade_off(graph, _schedules(graph))


def _schedules(graph: Graph) -> Iterator[Schedule]:
    yield keep_everything(graph)
    costs, edges, vertices = storage_problem(graph)
    target = len(costs) - 1
    problem = _problem(costs, edges)
    terms = [term for term, _, _ in _trade_off(problem)]
    step = max(1, -(-len(terms) // _MOST_CANDIDATES))
    for term in dict.fromkeys([*terms[::step], *terms[-1:]]):
        solution = _solution(problem, term)
        stored = {vertices[v - 1] for v in solution.stored if 0 < v < target}
        yield lower_kept(graph, stored)
        if solution.segments:
            last = max(solution.segments, key=max)
            yield lower_kept(graph, stored | {vertices[v - 1] for v in last})


class _Sets(NamedTuple):
    """The division tree as arrays; members stand after the set that they divide.

    Attributes:
        division: Of each set: 0 edge, 1 series, 2 branches or maximal split.
        total: Of each set: cost of its vertices.
        own: Of each set: cost of its endpoints.
        first: Of each set: where its members begin in `members`; the last entry ends them.
        members: The members of all sets.
        behind: Of each member of a series: cost of the splitting vertex behind it.
        ends: Where it ends when the costs of members and splitting vertices are added up from the source.
        begins: Where the next one begins then.
    """

    division: Ints
    total: Numbers
    own: Numbers
    first: Ints
    members: Ints
    behind: Numbers
    ends: Numbers
    begins: Numbers


@dataclass(frozen=True, slots=True)
class _Problem:
    """The division tree, and the same as arrays."""

    costs: Sequence[float]
    edges: list[tuple[int, int]]
    tree: tuple[ClosedSet, ...]
    sets: _Sets


def _problem(costs: Sequence[float], edges: Iterable[tuple[int, int]]) -> _Problem:
    for v, cost in enumerate(costs):
        if not cost >= 0:
            raise ValueError(f"costs[{v}] is {cost}, but memory is not negative")
    listed = [(int(a), int(b)) for a, b in edges]
    tree = divide(len(costs), listed)
    exact = all(isinstance(c, (int, np.integer)) for c in costs)
    kind = np.int64 if exact else np.float64
    first = np.cumsum([0, *(len(c.members) for c in tree)], dtype=np.int64)
    members = np.array([m for c in tree for m in c.members], dtype=np.int64)
    behind, ends, begins = (np.zeros(len(members), kind) for _ in range(3))
    total = np.zeros(len(tree), kind)
    own = np.array([sum(costs[v] for v in c.endpoints) for c in tree], dtype=kind)
    for s in reversed(range(len(tree))):
        part = tree[s]
        at = kind(0)
        for p, m in enumerate(part.members, int(first[s])):
            at += total[m]
            ends[p] = at
            if part.division == "series" and p + 1 < first[s + 1]:
                behind[p] = costs[part.endpoints[p - first[s]]]
                at += behind[p]
            begins[p] = at
        total[s] = at if part.division == "series" else at + own[s]
    codes = {"edge": 0, "series": 1}
    division = np.array([codes.get(c.division, 2) for c in tree], dtype=np.int64)
    return _Problem(costs, listed, tree, _Sets(division, total, own, first, members, behind, ends, begins))


def _terms(sets: _Sets) -> Numbers:
    """The costs that the costliest segment may have: of single sets, and of runs of members of a series."""
    found: list[NDArray[Any]] = [np.unique(sets.total)]
    for s in np.flatnonzero(sets.division == 1):
        a, b = sets.first[s], sets.first[s + 1]
        starts = np.concatenate([np.zeros(1, sets.begins.dtype), sets.begins[a : b - 1]])
        spans = sets.ends[None, a:b] - starts[:, None]
        found.append(np.unique(spans[np.triu_indices(b - a)]))
    return np.unique(np.concatenate([np.zeros(1, sets.total.dtype), *found]))


def _trade_off(problem: _Problem) -> Iterator[tuple[float, float, float]]:
    """Each max term that changes the solution, from large to small, with the stored and the largest segment's cost.

    Terms between a solution's actual largest segment and the term that gave it are skipped (Algorithm 1, line 7).
    """
    ends = problem.costs[problem.tree[0].source], problem.costs[problem.tree[0].target]
    fixed = sum(ends) if len(problem.costs) > 1 else ends[0]
    terms = _terms(problem.sets)
    position = len(terms) - 1
    while position >= 0:
        term = terms[position]
        stored, largest, _ = _least_stored(problem.sets, term)
        yield term.item(), fixed + stored, largest
        position = int(np.searchsorted(terms, float(largest))) - 1


@njit
def _least_stored(sets: _Sets, term: float) -> tuple[float, float, Ints]:
    """Least cost stored inside the whole graph when no segment may cost more than `term`, and its largest segment.

    Also, for each member of an expanded series, the place of the member behind which the segment that it ends begins
    (the place before the first member: at the source), or -2 where the member is a step of its own.
    """
    stored = np.zeros_like(sets.total)
    largest = np.zeros_like(sets.total)
    begin = np.full(len(sets.members), -2, np.int64)
    for s in range(len(sets.division) - 1, -1, -1):
        if sets.total[s] <= term:  # never expanded (section 4.3)
            largest[s] = sets.total[s]
        elif sets.division[s] == 1:
            stored[s], largest[s] = _cut_series(sets, s, term, stored, largest, begin)
        else:
            stored[s] = sets.own[s]
            for p in range(sets.first[s], sets.first[s + 1]):
                stored[s] += stored[sets.members[p]]
                largest[s] = max(largest[s], largest[sets.members[p]])
    return stored[0], largest[0], begin


@njit
def _cut_series(
    sets: _Sets, s: int, term: float, stored: Numbers, largest: Numbers, begin: Ints
) -> tuple[float, float]:
    """Cost stored inside a series and its largest segment, by a shortest path in the accessibility graph.

    A segment may begin at any position from which the span is within the term, so that the best start is the minimum
    of a sliding window. Position 0 is the source, position p + 1 lies behind member p.
    """
    first: int = sets.first[s]
    size: int = sets.first[s + 1] - first
    reach = np.zeros(size + 1, sets.total.dtype)  # least stored up to and including the splitting vertex there
    widest = np.zeros(size + 1, sets.total.dtype)
    begins = np.zeros(size + 1, sets.total.dtype)
    begins[1:] = sets.begins[first : first + size]
    queue = np.zeros(size + 1, np.int64)
    head, tail = 0, 1
    for p in range(size):
        # Starts leave the window for good as p grows.
        end = sets.ends[first + p]
        while head < tail and end - begins[queue[head]] > term:
            head += 1
        member = sets.members[first + p]
        value, wide = reach[p] + stored[member], max(widest[p], largest[member])
        if head < tail:
            start = queue[head]
            span = max(end - begins[start], widest[start])
            if reach[start] < value or (reach[start] == value and span < wide):
                value, wide = reach[start], span
                begin[first + p] = first + start - 1
        reach[p + 1] = value + sets.behind[first + p]
        widest[p + 1] = wide
        while head < tail and reach[queue[tail - 1]] >= reach[p + 1]:
            tail -= 1
        queue[tail] = p + 1
        tail += 1
    return reach[size], widest[size]


def _solution(problem: _Problem, term: float) -> Reforwarding:
    """The stored set of least cost for one max term, its segments, and its cost by equation (1)."""
    _, _, begin = _least_stored(problem.sets, term)
    tree, first, total = problem.tree, problem.sets.first, problem.sets.total
    stored = {tree[0].source, tree[0].target}
    expanded = [0]
    while expanded:
        s = expanded.pop()
        part = tree[s]
        if total[s] <= term:
            continue
        if part.division != "series":
            stored.update(part.endpoints)
            expanded += part.members
            continue
        p, start = int(first[s + 1]) - 1, int(first[s])
        while p >= start:
            if p + 1 < first[s + 1]:
                stored.add(part.endpoints[p - start])
            if begin[p] == -2:
                expanded.append(part.members[p - start])
                p -= 1
            else:
                p = int(begin[p])
    costs = problem.costs
    unstored = (v for v in range(len(costs)) if v not in stored)
    segments = tuple(frozenset(part) for part in connected_parts(unstored, problem.edges))
    largest = max((sum(costs[v] for v in segment) for segment in segments), default=0)
    return Reforwarding(tuple(sorted(stored)), segments, sum(costs[v] for v in stored) + largest)
