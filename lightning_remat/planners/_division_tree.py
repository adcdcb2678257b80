"""A computation graph as nested closed sets: in series, in branches, or neither."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from ..schedules.edges import connected_parts, dominators, topological_order, undirected

Division = Literal["edge", "series", "branches", "maximal_split"]


@dataclass(frozen=True, slots=True)
class ClosedSet:
    """Vertices between a source and a target that touch nothing else.

    Attributes:
        source: The one vertex that they read from outside.
        target: The one vertex outside that reads them.
        vertices: The vertices between the two, in topological order.
        division: How the members lie: `series` (type 1 of the paper) one after the other, `branches` (type 2) side
            by side, `maximal_split` (type 3) in a mesh; `edge` has no vertices and no members.
        members: Positions in the tree of the sets that it divides into, in order for `series`.
        endpoints: The vertices that no member contains: the splitting vertices of a series, in order, or the
            endpoints of the members of a maximal split.
    """

    source: int
    target: int
    vertices: tuple[int, ...]
    division: Division
    members: tuple[int, ...]
    endpoints: tuple[int, ...]


@dataclass(slots=True)
class _Part:
    """A closed set before its division: vertices in topological order and the edges among [s_ij]."""

    source: int
    target: int
    vertices: list[int]
    edges: list[tuple[int, int]]


def divide(num_vertices: int, edges: Iterable[tuple[int, int]]) -> tuple[ClosedSet, ...]:
    """The division tree of a directed acyclic graph, the whole graph first, members after the set they divide.

    The tree is unique. The time is about the number of edges for each level of the tree, and for a maximal split
    the number of edges times the pairs of dominators that its vertices have inside it.

    >>> [c.division for c in divide(4, [(0, 1), (1, 2), (0, 2), (2, 3)])]
    ['series', 'branches', 'edge', 'series', 'edge', 'edge', 'edge']

    Args:
        num_vertices: Vertices are numbered from 0.
        edges: Pairs (from, to); repeated ones count once.

    Raises:
        ValueError: A cycle, a vertex out of range, or not exactly one source and one target.

    Reference: Feng & Huang 2018, Definitions 1 to 9 and Algorithms 2 to 4. A closed set is connected here, so that
    the union of two branches is no segment of its own. Line 3 of Algorithm 4 is read with its condition negated.
    """
    unique = list(dict.fromkeys((int(a), int(b)) for a, b in edges))
    order = topological_order(num_vertices, unique)
    source, target = _ends(num_vertices, unique)
    rank = {v: position for position, v in enumerate(order)}
    parts = [_Part(source, target, [v for v in order if v not in (source, target)], unique)]
    tree: list[ClosedSet] = []
    while len(tree) < len(parts):
        part = parts[len(tree)]
        division, members, endpoints = _division(part, rank)
        places = tuple(range(len(parts), len(parts) + len(members)))
        parts += members
        tree.append(ClosedSet(part.source, part.target, tuple(part.vertices), division, places, endpoints))
        part.edges = []
    return tuple(tree)


def _ends(num_vertices: int, edges: Sequence[tuple[int, int]]) -> tuple[int, int]:
    sources = sorted(set(range(num_vertices)) - {b for _, b in edges})
    targets = sorted(set(range(num_vertices)) - {a for a, _ in edges})
    if len(sources) != 1 or len(targets) != 1:
        raise ValueError(
            f"the graph has sources {sources} and targets {targets}, but needs exactly one of each: join them to a "
            "vertex of cost 0"
        )
    return sources[0], targets[0]


def _division(part: _Part, rank: dict[int, int]) -> tuple[Division, list[_Part], tuple[int, ...]]:
    if not part.vertices:
        return "edge", [], ()
    # The vertices that no edge passes by (Definition 3): with one source and one target all paths meet there.
    splitting = dominators(part.edges, part.source)(part.target)[1:]
    if splitting:
        return "series", _series(part, splitting), tuple(splitting)
    branches = _branches(part)
    if len(branches) > 1:
        return "branches", branches, ()
    return _maximal_split(part, rank)


def _series(part: _Part, splitting: list[int]) -> list[_Part]:
    ends = [part.source, *splitting, part.target]
    members = [_Part(a, b, [], []) for a, b in pairwise(ends)]
    cuts = set(splitting)
    at, place = 0, {part.source: 0}
    for v in part.vertices:
        if v in cuts:
            at += 1
        else:
            members[at].vertices.append(v)
        place[v] = at
    for edge in part.edges:
        members[place[edge[0]]].edges.append(edge)
    return members


def _branches(part: _Part) -> list[_Part]:
    """The connected parts once source and target are taken out, and the edge between the two (Algorithm 3)."""
    branches = connected_parts(part.vertices, part.edges)
    members = [_Part(part.source, part.target, [], []) for _ in branches]
    home = {v: member for branch, member in zip(branches, members, strict=True) for v in branch}
    for v in part.vertices:
        home[v].vertices.append(v)
    for a, b in part.edges:
        member = home.get(a) or home.get(b)
        if member is None:
            members.append(_Part(a, b, [], [(a, b)]))
        else:
            member.edges.append((a, b))
    return members


def _maximal_split(part: _Part, rank: dict[int, int]) -> tuple[Division, list[_Part], tuple[int, ...]]:
    """The largest closed sets inside (Algorithm 4): no two of them overlap, and all edges lie in one."""
    near = undirected((part.source, *part.vertices, part.target), part.edges)
    above = dominators(part.edges, part.source)
    below = dominators(((b, a) for a, b in part.edges), part.target)
    home: dict[int, tuple[int, int]] = {}  # vertex -> source and target of the member that contains it
    for v in part.vertices:
        if v in home:
            continue
        largest: list[int] = []
        for k in above(v):
            for t in below(v):
                if (k, t) != (part.source, part.target):
                    inside = _enclosed(v, k, t, near, rank)
                    if len(inside) > len(largest):
                        largest = inside
                        for w in inside:
                            home[w] = (k, t)
    members: dict[tuple[int, int], _Part] = {}
    for v in part.vertices:
        if v in home:
            members.setdefault(home[v], _Part(*home[v], [], [])).vertices.append(v)
    for a, b in part.edges:
        key = home.get(a) or home.get(b) or (a, b)
        members.setdefault(key, _Part(*key, [], [])).edges.append((a, b))
    return "maximal_split", list(members.values()), tuple(v for v in part.vertices if v not in home)


def _enclosed(v: int, k: int, t: int, near: Any, rank: dict[int, int]) -> list[int]:
    """What is connected to v once k and t are taken out, or nothing where that reaches past the two."""
    first, last = rank[k], rank[t]
    seen, stack, found = {v, k, t}, [v], [v]
    while stack:
        for w in near[stack.pop()]:
            if w not in seen:
                if not first < rank[w] < last:
                    return []
                seen.add(w)
                stack.append(w)
                found.append(w)
    return found
