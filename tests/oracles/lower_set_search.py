"""Every increasing sequence of lower sets of a tiny graph, costed from the sets of equations (1) and (2) themselves.

Kusumoto et al. 2019, sections 2 and 3; written from the definitions, with no dynamic program and no bit masks.
"""

from collections.abc import Iterable, Iterator
from itertools import combinations

from hypothesis import strategies as st

Edges = Iterable[tuple[int, int]]
Nodes = frozenset[int]


def every_lower_set(count: int, edges: Edges) -> list[Nodes]:
    """All subsets that no edge enters from outside."""
    edges = list(edges)
    subsets = (frozenset(c) for size in range(count + 1) for c in combinations(range(count), size))
    return [s for s in subsets if all(v in s for v, w in edges if w in s)]


def every_pruned_lower_set(count: int, edges: Edges) -> list[Nodes]:
    """What each node depends on, the empty set and the whole."""
    edges = list(edges)
    family = {frozenset[int](), frozenset(range(count))}
    for v in range(count):
        reached = {v}
        while more := {a for a, b in edges if b in reached} - reached:
            reached |= more
        family.add(frozenset(reached))
    return sorted(family, key=lambda s: (len(s), sorted(s)))


def every_sequence(family: list[Nodes]) -> Iterator[tuple[Nodes, ...]]:
    """All strictly increasing sequences within `family` that start above the empty set and end with the whole."""
    whole = max(family, key=len)

    def extend(sequence: tuple[Nodes, ...]) -> Iterator[tuple[Nodes, ...]]:
        last = sequence[-1] if sequence else frozenset[int]()
        if last == whole:
            yield sequence
            return
        for larger in family:
            if last < larger:
                yield from extend((*sequence, larger))

    yield from extend(())


def cost_of(
    times: list[float], memories: list[float], edges: Edges, sequence: tuple[Nodes, ...]
) -> tuple[float, float]:
    """Overhead by equation (1) and peak by equation (2)."""
    edges = list(edges)
    everything = frozenset(range(len(times)))

    def after(s: Nodes) -> Nodes:
        return frozenset(w for v, w in edges if v in s)

    def before(s: Nodes) -> Nodes:
        return frozenset(v for v, w in edges if w in s)

    def weight(s: Nodes) -> float:
        return sum(memories[v] for v in s)

    overhead, peak = 0.0, 0.0
    cached, previous = frozenset[int](), frozenset[int]()
    for lower_set in sequence:
        segment = lower_set - previous
        boundary = before(everything - lower_set) & lower_set
        overhead += sum(times[v] for v in segment - boundary)
        beyond = weight(after(lower_set) - lower_set) + weight(before(after(lower_set)) - lower_set)
        peak = max(peak, weight(cached) + 2 * weight(segment) + beyond)
        cached |= boundary
        previous = lower_set
    return overhead, peak


@st.composite
def lower_set_problems(draw, *, most: int = 7) -> tuple[list[float], list[float], list[tuple[int, int]]]:
    """Times, memories and edges; the node numbers are no topological order, there may be several sources and sinks."""
    count = draw(st.integers(1, most))
    order = draw(st.permutations(range(count)))
    pairs = list(combinations(range(count), 2))
    density = draw(st.sampled_from([0.2, 0.4, 0.7]))
    rng = draw(st.randoms(use_true_random=False))
    edges = [(order[a], order[b]) for a, b in pairs if (b == a + 1 and rng.random() < 0.6) or rng.random() < density]
    times = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    memories = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    return [float(t) for t in times], memories, edges
