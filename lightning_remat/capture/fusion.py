"""Groups of fx nodes that must run together: a storage and everything that overwrites it are one operation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from networkx.utils import UnionFind  # pyright: ignore[reportMissingTypeStubs]
from torch import fx

from ..operations.synchronized import shares_statistics
from .aliasing import Record

Group = list[fx.Node]


def group(graph: fx.Graph, records: dict[fx.Node, Record], effects: Collection[fx.Node]) -> list[Group]:
    """The operations, each a list of fx nodes in their original order, in an order in which they can run.

    An in-place operation is fused with the producer of the storage that it writes and with every node between them
    that touches this storage: a recomputation then never meets a half-written value. A group runs where its last
    part stood. Where that would change the order of random draws, of reads and writes of a buffer, or of three or more
    gradient contributions to one value, the nodes in between are fused too, so that results stay bitwise equal.
    Effects are parts of the operation that follows them, but for those that draw. What lies in a transform of
    `torch.func` is one operation. Shapes are parts only of an operation that both makes and reads them.

    Args:
        graph: The captured graph; a shape that others read as well becomes two nodes here.
        records: What its nodes did; completed.
        effects: The nodes that only act on what lives outside the graph.
    """
    spans = _transforms(graph)
    inner = {n for span in spans for n in span}
    nodes = [
        n
        for n in graph.nodes
        if n.op.startswith("call") and (records[n].has_tensors or records[n].writes or n in inner or n in effects)
    ]
    position = {n: i for i, n in enumerate(graph.nodes)}
    fused: Any = UnionFind(nodes)

    def join(members: Iterable[fx.Node]) -> None:
        fused.union(*(m for m in members if m in fused.parents))

    for span in spans:
        join(span)
    for n in nodes:
        for owner in records[n].writes:
            if owner in fused.parents:
                span = range(position[owner], position[n] + 1)
                join([m for m in nodes if position[m] in span and (m is owner or _touches(m, owner, records))])
    _join_effects(nodes, effects, records, join)
    written = {owner for n in nodes for owner in records[n].writes if owner.op == "placeholder"}
    for n in nodes:
        if not written.isdisjoint(records[n].views) and n not in effects and not records[n].owns:
            join([n, *n.users])  # a recomputation of its readers sees the buffer as it was
    while True:
        by_root: dict[fx.Node, Group] = {}
        for n in nodes:
            by_root.setdefault(fused[n], []).append(n)
        groups = list(by_root.values())
        if clash := _cycle(groups):
            join(clash)
            continue
        ordered = _order(groups, position)
        if not (clash := _reordered(ordered, position, records, written)):
            return _with_own_constants(ordered, graph, records)
        join(clash)


def _with_own_constants(groups: list[Group], graph: fx.Graph, records: dict[fx.Node, Record]) -> list[Group]:
    """The groups with the constants (shapes) that they read of their own parts, known only while they run.

    `y.masked_fill_(mask.expand(y.size()), 0)` is one operation with a shape in its middle. Where others read the shape,
    too, theirs stays outside, and the group gets a copy.
    """
    owner = {n: k for k, members in enumerate(groups) for n in members}
    constants = [n for n in graph.nodes if n.op.startswith("call") and n not in owner]
    sources: dict[fx.Node, set[int]] = {n: {k} for n, k in owner.items()}
    readers = dict(sources)
    for n in constants:
        sources[n] = set[int]().union(*(sources.get(i, ()) for i in n.all_input_nodes))
    for n in reversed(constants):
        readers[n] = set[int]().union(*(readers.get(u, ()) for u in n.users))
    # One in two groups would be a cycle.
    home = {n: next(iter(found)) for n in constants if (found := sources[n] & readers[n])}
    copies: dict[fx.Node, fx.Node] = {}
    for n in home:
        with graph.inserting_before(n):
            copies[n] = graph.node_copy(n, lambda i: copies.get(i, i))
        records[copies[n]] = records[n]
    for n in reversed(home):
        members = set(groups[home[n]])
        n.replace_all_uses_with(copies[n], delete_user_cb=members.__contains__)
        if not n.users:
            graph.erase_node(n)
    position = {n: i for i, n in enumerate(graph.nodes)}
    own: dict[int, Group] = {}
    for n, k in home.items():
        own.setdefault(k, []).append(copies[n])
    return [sorted([*g, *own.get(k, ())], key=position.__getitem__) for k, g in enumerate(groups)]


def _transforms(graph: fx.Graph) -> list[list[fx.Node]]:
    """What lies in each outermost transform (`vmap`), from its beginning to its end: its tensors live only there."""
    found: list[list[fx.Node]] = []
    depth = 0
    for n in graph.nodes:
        name = getattr(n.target, "__name__", "")
        if name.endswith("_increment_nesting"):
            if not depth:
                found.append([])
            depth += 1
        if depth and n.op.startswith("call"):
            found[-1].append(n)
        if name.endswith("_decrement_nesting"):
            depth -= 1
    return found


def _join_effects(
    nodes: list[fx.Node],
    effects: Collection[fx.Node],
    records: dict[fx.Node, Record],
    join: Callable[[Iterable[fx.Node]], None],
) -> None:
    """Every effect with the next operation; with the one before where the next reads what it writes, or is none.

    Effects that draw random numbers stay apart: an operation that runs again without them would draw what they drew. So
    do those that make something of their own, which it would miss, and those before the first operation that it reads.
    """
    places = [k for k, n in enumerate(nodes) if n not in effects]
    for before, after in pairwise([-1, *places, len(nodes)]):
        between = nodes[before + 1 : after]
        written = {owner for n in between for owner in records[n].writes}
        is_read = after == len(nodes) or not written.isdisjoint(_owners_read(nodes[after], records))
        if any(records[n].is_random or shares_statistics(n) for n in between):
            join(between)
        elif before >= 0 and is_read:
            join([nodes[before], *between])
        else:
            join(between if is_read else [nodes[after], *between])


def _owners_read(n: fx.Node, records: dict[fx.Node, Record]) -> set[fx.Node]:
    """The nodes that own the storages that `n` reads."""
    return {owner for i in n.all_input_nodes for owner in (i, *records[i].views)}


def read_again(groups: list[Group], effects: Collection[fx.Node], records: dict[fx.Node, Record]) -> set[fx.Node]:
    """The effects that are none: what they write is read later in their operation, whose recomputation repeats them."""
    found: set[fx.Node] = set()
    for members in groups:
        written: set[fx.Node] = set()
        for n in members:
            if n in effects:
                written |= records[n].writes
            elif not written.isdisjoint(_owners_read(n, records)):
                found |= {m for m in members if m in effects}
    return found


def _touches(n: fx.Node, owner: fx.Node, records: dict[fx.Node, Record]) -> bool:
    """Whether `n` reads, views or writes the storage that `owner` made."""
    return owner in records[n].writes | records[n].views | _owners_read(n, records)


def _edges(groups: list[Group]) -> list[set[int]]:
    """For each group, the groups whose values it reads, through constants (shapes) as well."""
    owner = {n: i for i, members in enumerate(groups) for n in members}
    reached: dict[fx.Node, set[int]] = {}

    def sources(n: fx.Node) -> set[int]:
        if n in owner:
            return {owner[n]}
        if n not in reached:
            reached[n] = set().union(*(sources(i) for i in n.all_input_nodes))
        return reached[n]

    return [set().union(*(sources(i) for n in g for i in n.all_input_nodes)) - {k} for k, g in enumerate(groups)]


def _cycle(groups: list[Group]) -> list[fx.Node]:
    """One node of each group on a cycle (a group and what lies between its parts), or nothing."""
    try:
        TopologicalSorter(dict(enumerate(_edges(groups)))).prepare()
    except CycleError as error:
        return [groups[k][0] for k in error.args[1][:-1]]
    return []


def _order(groups: list[Group], position: dict[fx.Node, int]) -> list[Group]:
    """Groups by the place of their last part, later where an input is."""
    edges = _edges(groups)
    rank = sorted(range(len(groups)), key=lambda k: position[groups[k][-1]])
    done: set[int] = set()
    result: list[Group] = []

    def emit(k: int) -> None:
        for j in sorted(edges[k] - done, key=lambda j: position[groups[j][-1]]):
            if j not in done:
                emit(j)
        done.add(k)
        result.append(groups[k])

    for k in rank:
        if k not in done:
            emit(k)
    return result


def _reordered(
    groups: list[Group], position: dict[fx.Node, int], records: dict[fx.Node, Record], written: set[fx.Node]
) -> list[fx.Node]:
    """Two nodes whose exchange could be seen, or nothing."""
    executed = [n for g in groups for n in g]
    streams: dict[object, list[fx.Node]] = {}
    for n in executed:
        if records[n].is_random:
            streams.setdefault("random", []).append(n)
        for buffer in written & (_owners_read(n, records) | records[n].writes):
            streams.setdefault(("buffer", buffer), []).append(n)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for n in executed:
        for value in _differentiated(n, records):
            readers.setdefault(value, []).append(n)
    # What is returned gets one from outside before all others, and what came in may be read outside as well.
    outer = {n for n in position if n.op == "placeholder"}
    outer.update(_differentiated(next(n for n in reversed(position) if n.op == "output"), records))
    streams.update({k: v for k, v in readers.items() if len(v) + (k in outer) > 2})
    for stream in streams.values():
        for a, b in pairwise(stream):
            if position[a] > position[b]:
                return [a, b]
    return []


def _differentiated(n: fx.Node, records: dict[fx.Node, Record]) -> list[fx.Node]:
    """The values to which a node contributes gradients, each as often as it does (twice in `y * y`).

    A node that only passes a value on passes its gradient on as well: they are counted by the owner of the storage.
    """
    read: list[fx.Node] = []
    fx.map_arg((n.args, n.kwargs), read.append)
    return [v for i in read if i in records[n].differentiates for v in records[i].views or {i}]
