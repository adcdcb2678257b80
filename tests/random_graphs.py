"""Hypothesis strategies: random graphs with views, tapes and shared gradients, and random valid schedules on them."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_remat import Graph, Node, Schedule
from lightning_remat.schedules.schedule import Action

sizes = st.integers(0, 9)


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 8) -> Graph:
    """A graph in which every node but the last is read by a later one, more or less as networks are."""
    nodes: list[Node] = []
    for n in range(draw(st.integers(1, max_nodes))):
        inputs = draw(st.sets(st.integers(max(0, n - 4), n - 1), max_size=3)) | {n - 1} if n else set[int]()
        is_view = bool(n) and draw(st.integers(0, 5)) == 0
        readable = sorted(i for i in {*inputs, n} if not is_view or i != n)
        output_bytes = 0 if is_view else draw(st.integers(1, 9))
        shares = draw(st.sampled_from([None, tuple(sorted(inputs))])) if not is_view else None
        nodes.append(
            Node(
                name=f"n{n}",
                kind="view" if is_view else draw(st.sampled_from(["conv2d", "relu", "add"])),
                inputs=tuple(sorted(inputs)),
                saved=() if is_view else tuple(draw(st.sets(st.sampled_from(readable)))),
                output_bytes=output_bytes,
                tape_bytes=0 if is_view else draw(st.sampled_from([0, 0, 3])),
                forward_seconds=draw(st.integers(1, 9)),
                backward_seconds=draw(st.integers(1, 9)),
                forward_workspace_bytes=draw(sizes),
                backward_workspace_bytes=draw(sizes),
                parameter_bytes=draw(sizes),
                storage_of=n - 1 if is_view else None,
                shares_gradient=shares,
            )
        )
    outputs = draw(st.sampled_from([(), (len(nodes) - 1,)]))
    return Graph(tuple(nodes), input_bytes=draw(sizes), static_bytes=draw(sizes), outputs=outputs)


@st.composite
def schedules(draw: st.DrawFn, graph: Graph, *, in_forward: bool = True) -> Schedule:
    """A valid schedule that discards and recomputes at random, in autograd's order of first runs and backwards.

    Args:
        graph: What to schedule.
        in_forward: Whether values may be discarded and recomputed before the first backward.
    """
    actions: list[Action] = []
    outputs: set[int] = set()
    tapes: set[int] = set()

    def run(n: int) -> None:
        for i in graph.reads[n]:
            if i not in outputs:
                run(i)
        if n in outputs and (n in tapes or not graph.nodes[n].tape_bytes):
            return
        actions.append(Action("F", n))
        outputs.add(n)
        if graph.nodes[n].tape_bytes:
            tapes.add(n)

    def discard() -> None:
        for n in sorted(outputs):
            if draw(st.integers(0, 2)) == 0:
                actions.append(Action("D", n))
                outputs.discard(n)
        for n in sorted(tapes):
            if draw(st.integers(0, 2)) == 0:
                actions.append(Action("T", n))
                tapes.discard(n)

    for n in range(len(graph.nodes)):
        run(n)
        if in_forward:
            discard()
    for n in reversed(range(len(graph.nodes))):
        discard()
        needs_tape = graph.nodes[n].tape_bytes > 0
        while any(i not in outputs for i in graph.nodes[n].saved) or (needs_tape and n not in tapes):
            for i in graph.nodes[n].saved:
                run(i)
            if needs_tape and n not in tapes:
                run(n)
        actions.append(Action("B", n))
    actions += [Action("D", n) for n in sorted(outputs)]
    actions += [Action("T", n) for n in sorted(tapes)]
    return Schedule(tuple(actions))
