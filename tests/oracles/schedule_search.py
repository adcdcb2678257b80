"""The best schedules of tiny graphs by search over all states of memory, written from the simulator's rules alone."""

import heapq
from collections.abc import Iterator
from itertools import count as counter
from typing import NamedTuple

from lightning_remat import Graph, Schedule, simulate
from lightning_remat.schedules.schedule import Action


class State(NamedTuple):
    """Between two actions."""

    step: int  # first runs and backwards taken so far
    outputs: frozenset[int]
    tapes: frozenset[int]
    last: int  # the last node run in this step


def fastest(graph: Graph, budget_bytes: int, *, is_ordered: bool = True) -> float | None:
    """Least seconds of recomputation of any schedule whose simulated peak is within the budget, or None.

    First runs come in index order and backwards in the opposite one. `is_ordered`: within a step, nodes are run at
    most once, in index order.
    """
    return _search(graph, is_ordered, budget_bytes, combine=lambda seconds, cost, _: seconds + cost)


def lowest_peak(graph: Graph, *, is_ordered: bool = True) -> int:
    """The lowest simulated peak of any such schedule."""
    found = _search(graph, is_ordered, None, combine=lambda peak, _, memory: max(peak, memory))
    assert found is not None
    return int(found)


def _search(graph, is_ordered, budget_bytes, combine):
    rules = _Rules(graph, is_ordered)
    start = State(0, frozenset(), frozenset(), -1)
    best, order, done = {start: 0.0}, counter(), set()
    queue = [(0.0, next(order), start)]
    while queue:
        value, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        if state.step == 2 * rules.count and not state.outputs and not state.tapes:
            return value
        for after, seconds, memory in rules.moves(state):
            if budget_bytes is not None and memory > budget_bytes:
                continue
            key = combine(value, seconds, memory)
            if key < best.get(after, float("inf")):
                best[after] = key
                heapq.heappush(queue, (key, next(order), after))
    return None


class _Rules:
    def __init__(self, graph: Graph, is_ordered: bool) -> None:
        self.graph, self.is_ordered, self.count = graph, is_ordered, len(graph.nodes)
        self.before, self.most = gradient_constants(graph)

    def alive(self, state: State) -> int:
        graph = self.graph
        m = 2 * self.count - 1 - state.step
        storages = {graph.roots[i] for i in state.outputs}
        # What the caller holds between its first run and its backward shares the storage of what is resident.
        storages |= {graph.roots[o] for o in graph.outputs if o < state.step and o <= m}
        alive = graph.input_bytes + graph.static_bytes + sum(graph.nodes[r].output_bytes for r in storages)
        alive += sum(graph.nodes[i].tape_bytes for i in state.tapes)
        return alive + (self.before[m] if 0 <= m < self.count else 0)

    def moves(self, state: State) -> Iterator[tuple[State, float, int]]:
        graph, n = self.graph, self.count
        step, outputs, tapes, last = state
        alive = self.alive(state)
        for i in outputs:
            yield State(step, outputs - {i}, tapes, last), 0.0, alive
        for i in tapes:
            yield State(step, outputs, tapes - {i}, last), 0.0, alive
        if step == 2 * n:
            return
        for i in range(min(step + 1, n)):
            node = graph.nodes[i]
            is_first = i == step
            if (self.is_ordered and i <= last) or (i in outputs and (i in tapes or not node.tape_bytes)):
                continue
            base = () if node.storage_of is None else (node.storage_of,)
            if not all(k in outputs for k in (*node.inputs, *base)):
                continue
            if i not in outputs and not node.is_view and self._storage_lives(state, i):
                continue  # a second copy of a storage that a view or the caller keeps alive never helps
            memory = alive + node.output_bytes + node.tape_bytes + node.forward_workspace_bytes
            after = State(
                step + is_first,
                outputs | {i},
                tapes | {i} if node.tape_bytes else tapes,
                -1 if is_first else i if self.is_ordered else -1,
            )
            yield after, 0.0 if is_first else node.forward_seconds, memory
        if step >= n:
            m = 2 * n - 1 - step
            node = graph.nodes[m]
            if all(i in outputs for i in node.saved) and (m in tapes or not node.tape_bytes):
                yield State(step + 1, outputs, tapes, -1), 0.0, alive - self.before[m] + self.most[m]

    def _storage_lives(self, state: State, i: int) -> bool:
        graph, m = self.graph, 2 * self.count - 1 - state.step
        return any(graph.roots[o] == i for o in state.outputs) or any(
            graph.roots[o] == i and o < state.step and o <= m for o in graph.outputs
        )


def gradient_constants(graph: Graph) -> tuple[list[int], list[int]]:
    """Levels of gradients before and during each backward, read off the timeline of a step that keeps everything."""
    n = len(graph.nodes)
    actions = [Action("F", i) for i in range(n)]
    for i in reversed(range(n)):
        actions += [Action("B", i), Action("D", i)]
        actions += [Action("T", i)] if graph.nodes[i].tape_bytes else []
    timeline = simulate(graph, Schedule(tuple(actions))).memory_bytes
    before, most = [0] * n, [0] * n
    for i in reversed(range(n)):
        kept = graph.input_bytes + graph.static_bytes
        kept += sum(node.output_bytes + node.tape_bytes for node in graph.nodes[: i + 1])
        most[i] = timeline[actions.index(Action("B", i))] - kept
        if i:
            before[i - 1] = timeline[actions.index(Action("D", i))] - kept
    return before, most
