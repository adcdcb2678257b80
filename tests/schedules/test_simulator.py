from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import graphs, schedules

from lightning_remat import Graph, Node, Schedule, ScheduleError, simulate
from lightning_remat.lowering import apply_liveness
from lightning_remat.schedules.compiled_simulator import Judge


def chain(*, count: int = 3, tape: int = 0) -> Graph:
    """Operations of 10 bytes that save their own output (and a tape) and cost 1 and 2 seconds."""
    nodes = (
        Node(
            f"n{i}",
            inputs=(i - 1,) if i else (),
            saved=(i,),
            output_bytes=10,
            tape_bytes=tape,
            forward_seconds=1.0,
            backward_seconds=2.0,
        )
        for i in range(count)
    )
    return Graph(tuple(nodes), input_bytes=1, static_bytes=2)


def test_plain_step_by_hand() -> None:
    simulation = simulate(chain(), Schedule.parse("F0 F1 F2 B2 D2 B1 D1 B0 D0"))
    # 3 static; three outputs; at B2 the gradients of the outputs of 2 and of 1.
    assert simulation.memory_bytes == (13, 23, 33, 53, 43, 43, 33, 23, 13)
    assert simulation.peak_bytes == 53
    assert (simulation.seconds, simulation.recompute_seconds) == (9.0, 0.0)


def test_recomputation_costs_time_and_saves_memory() -> None:
    simulation = simulate(chain(), Schedule.parse("F0 F1 D0 F2 D1 B2 D2 F0 F1 B1 D1 B0 D0"))
    assert simulation.peak_bytes == 43
    assert (simulation.seconds, simulation.recompute_seconds) == (11.0, 2.0)
    assert simulation.recompute_overhead == pytest.approx(2 / 9)


def test_recomputations_have_their_prices_and_so_has_each_stretch_of_them() -> None:
    graph = replace(chain(), nodes=tuple(replace(node, rerun_price=0.5, stretch_price=10.0) for node in chain().nodes))
    at_once = simulate(graph, Schedule.parse("F0 F1 D0 F2 D1 B2 D2 F0 F1 B1 D1 B0 D0"))
    assert (at_once.seconds, at_once.recompute_seconds) == (9 + 2 + 1 + 10, 2 + 1 + 10)
    twice = simulate(graph, Schedule.parse("F0 F1 D0 F2 D1 D2 F0 F1 D0 F2 B2 D2 B1 D1 F0 B0 D0"))
    assert twice.recompute_seconds == 4 + 2 + 2 * 10
    assert sum(twice.action_seconds) == twice.seconds
    assert twice.action_seconds[6] == 1 + 0.5 + 10  # discards between cost nothing and end no stretch
    assert twice.action_seconds[7:10] == (1.5, 0.0, 1.5)


def test_recomputations_are_not_recorded() -> None:
    graph = replace(chain(), nodes=tuple(replace(node, recording_seconds=0.25) for node in chain().nodes))
    simulation = simulate(graph, Schedule.parse("F0 F1 D0 F2 D1 B2 D2 F0 F1 B1 D1 B0 D0"))
    assert (simulation.seconds, simulation.recompute_seconds) == (9 + 1.5, 1.5)


def test_a_tape_has_its_price_where_a_recomputation_brings_it() -> None:
    nodes = tuple(replace(node, tape_bytes=8, tape_price=10.0**n) for n, node in enumerate(chain().nodes))
    graph = replace(chain(), nodes=nodes)
    kept = simulate(graph, Schedule.parse("F0 F1 D0 F2 B2 D2 T2 B1 D1 T1 F0 B0 D0 T0"))
    assert kept.recompute_seconds == 1
    brought = simulate(graph, Schedule.parse("F0 F1 D0 T0 F2 D1 T1 B2 D2 T2 F0 F1 B1 D1 T1 B0 D0 T0"))
    assert brought.recompute_seconds == 2 + 1 + 10
    assert brought.action_seconds[10:12] == (1 + 1, 1 + 10)


def test_hooks_have_their_price_where_something_that_is_read_goes_in_between() -> None:
    graph = replace(chain(), nodes=tuple(replace(node, hook_price=10.0**n) for n, node in enumerate(chain().nodes)))
    assert [node.saved for node in graph.nodes] == [(0,), (1,), (2,)]
    plain = simulate(graph, Schedule.parse("F0 F1 F2 B2 D2 B1 D1 B0 D0"))
    assert plain.recompute_seconds == 0
    one = simulate(graph, Schedule.parse("F0 F1 D0 F2 B2 D2 B1 D1 F0 B0 D0"))
    assert one.recompute_seconds == 1 + 1
    assert one.action_seconds[9] == 2 + 1  # with the backward of which the hooks are
    again = simulate(graph, Schedule.parse("F0 F1 D0 F2 D1 B2 D2 F0 F1 D0 B1 D1 F0 B0 D0"))
    assert again.recompute_seconds == 3 + 1 + 10, "however often it goes"


def test_hooks_have_their_price_where_what_a_run_saves_has_gone_before() -> None:
    pair = Node("pair", output_bytes=16)
    item = Node("item", inputs=(0,), storage_of=0)
    reader = Node("reader", inputs=(1,), saved=(0,), output_bytes=8, hook_price=10.0)
    graph = Graph((pair, item, reader))
    there = Schedule.parse("F0 F1 F2 B2 D2 B1 D1 B0 D0")
    gone = Schedule.parse("F0 F1 D0 F2 D1 F0 B2 D2 D0 F0 F1 D1 B1 B0 D0")
    assert simulate(graph, there).recompute_seconds == 0
    simulation = simulate(graph, gone)
    assert simulation.action_seconds[6] == 10
    assert Judge(graph).cost(gone) == (simulation.peak_bytes, simulation.seconds)


@pytest.mark.parametrize(
    ("saved", "text", "price"),
    [
        ((1,), "F0 F1 D0 F2 D1 F0 F1 D0 B2 D2 D1 F0 B1 B0 D0", 0),  # first made for the second alone
        ((0, 1), "F0 F1 F2 D0 D1 F0 F1 B2 D2 D1 B1 B0 D0", 0),
        ((0, 1), "F0 F1 F2 D0 D1 F0 F1 B2 D2 D1 D0 F0 B1 B0 D0", 110),  # made again when it had been read
        ((0, 1), "F0 F1 F2 D1 F1 B2 D2 D1 D0 F0 B1 B0 D0", 10),  # discarded when it had been read
    ],
)
def test_what_is_made_for_others_first_rests_until_a_backward_reads_it(
    saved: tuple[int, ...], text: str, price: float
) -> None:
    second = Node("second", inputs=(0,), saved=(0,), held=(0,), output_bytes=8, hook_price=10.0)
    third = Node("third", inputs=saved, saved=saved, held=saved, output_bytes=8, hook_price=100.0)
    graph, schedule = Graph((Node("first", output_bytes=8), second, third)), Schedule.parse(text)
    simulation = simulate(graph, schedule)
    assert simulation.recompute_seconds == price
    assert Judge(graph).cost(schedule) == (simulation.peak_bytes, simulation.seconds)


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("F1", 0, "reads the output of node 0"),
        ("F0 F0", 1, "resident already"),
        ("F0 D1", 1, "not resident"),
        ("F0 T0", 1, "it has no tape"),
        ("F0 F1 F2 B1", 3, "backward of its user node 2"),
        ("F0 F1 F2 D2 B2", 4, "reads the output of node 2"),
        ("F0 F1 F2 B2 B2", 4, "run already"),
        ("B0", 0, "has not run forward"),
        ("F0 F1 F2 F3", 3, "no node 3"),
        ("F0 F1 F2 B2 D2 B1 D1 B0", 8, "ends with the output of node 0"),
        ("F0 F1 F2 B2 D2 B1 D1 D0", 8, "ends without the backward of node 0"),
    ],
)
def test_every_rule_marks_the_action(text: str, position: int, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason) as caught:
        simulate(chain(), Schedule.parse(text))
    assert caught.value.position == position
    line, carets, *_ = str(caught.value).splitlines()
    words = text.split()
    assert line[carets.index("^") :].split()[:1] == words[position : position + 1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("F0 F1 F2 T2 B2", "reads its tape"),
        ("F0 T0 T0", "tape is not resident"),
        ("F0 F1 F2 B2 D2 B1 D1 B0 D0", "ends with the tape of node 0"),
    ],
)
def test_tape_rules(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        simulate(chain(tape=5), Schedule.parse(text))


def test_bringing_back_a_tape_makes_a_second_output_for_a_moment() -> None:
    simulation = simulate(chain(count=1, tape=5), Schedule.parse("F0 T0 F0 B0 D0 T0"))
    assert simulation.memory_bytes == (18, 18, 28, 28, 18, 8)


def test_a_view_keeps_the_storage_it_views() -> None:
    view = Node("v", inputs=(0,), storage_of=0)
    graph = Graph((Node("a", output_bytes=10), view, Node("b", inputs=(1,), output_bytes=1)))
    simulation = simulate(graph, Schedule.parse("F0 F1 D0 F2 D1 D2 B2 B1 B0"))
    assert simulation.memory_bytes[:6] == (10, 10, 10, 11, 11, 1)


def test_a_shared_gradient_takes_no_memory() -> None:
    a, b = Node("a", output_bytes=10), Node("b", output_bytes=10)
    total = Node("c", kind="add", inputs=(0, 1), output_bytes=10)
    text = Schedule.parse("F0 F1 F2 D0 D1 D2 B2 B1 B0")
    assert simulate(Graph((a, b, total)), text).memory_bytes[6:] == (30, 20, 10)
    shared = replace(total, shares_gradient=(0, 1))
    assert simulate(Graph((a, b, shared)), text).memory_bytes[6:] == (10, 10, 10)


def test_a_second_contribution_is_added_to_the_first() -> None:
    """Residual: node 0 feeds 1 and 2; when B1 contributes, the gradient that B2 made exists."""
    nodes = (
        Node("a", output_bytes=10),
        Node("b", inputs=(0,), output_bytes=4),
        Node("c", inputs=(0, 1), output_bytes=4),
    )
    text = Schedule.parse("F0 F1 F2 D0 D1 D2 B2 B1 B0")
    # B2: its own 4, and 10 and 4 for a and b. B1: 10 for a, 4 its own, and 10 more before they are added.
    assert simulate(Graph(nodes), text).memory_bytes[6:] == (18, 24, 10)


def test_a_shared_gradient_is_not_added_to_in_place() -> None:
    nodes = (
        Node("a", output_bytes=10),
        Node("b", inputs=(0,), output_bytes=10),
        Node("c", inputs=(0, 1), output_bytes=10, shares_gradient=(0, 1)),
        Node("d", inputs=(1,), output_bytes=1),
        Node("e", inputs=(2, 3), output_bytes=1),
    )
    text = Schedule.parse("F0 F1 F2 F3 F4 D0 D1 D2 D3 D4 B4 B3 B2 B1 B0")
    # At B2 b's gradient (10, from d) takes c's shared 10 in place. a holds c's gradient alone by then; B1 adds to it.
    assert simulate(Graph(nodes), text).memory_bytes[10:] == (12, 21, 20, 30, 10)


def test_elements_of_a_tuple_are_not_summed() -> None:
    nodes = (
        Node("split", output_bytes=10, num_outputs=2),
        Node("x", inputs=(0,), storage_of=0, gradient_bytes=5),
        Node("y", inputs=(0,), storage_of=0, gradient_bytes=5),
        Node("add", inputs=(1, 2), output_bytes=5),
    )
    text = Schedule.parse("F0 F1 F2 F3 D0 D1 D2 D3 B3 B2 B1 B0")
    assert simulate(Graph(nodes), text).memory_bytes[8:] == (15, 10, 10, 10)


def test_parameter_gradients_fresh_and_kept() -> None:
    graph = Graph((Node("a", output_bytes=10, parameter_bytes=7),))
    text = Schedule.parse("F0 D0 B0")
    assert simulate(graph, text).memory_bytes == (10, 10, 17)
    assert simulate(graph, text, gradients="kept").memory_bytes == (17, 17, 24)
    with pytest.raises(ValueError, match="fresh"):
        simulate(graph, text, gradients="lost")  # type: ignore[arg-type]


def test_nodes_without_gradients_make_none() -> None:
    nodes = (Node("mask", output_bytes=10, gradient_bytes=0), Node("a", inputs=(0,), output_bytes=10))
    assert simulate(Graph(nodes), Schedule.parse("F0 F1 D0 D1 B1 B0")).memory_bytes[4:] == (10, 0)


def test_the_caller_holds_an_output_until_its_backward() -> None:
    graph = Graph((Node("a", output_bytes=10), Node("b", inputs=(0,), output_bytes=10)), outputs=(1,))
    assert simulate(graph, Schedule.parse("F0 F1 D0 D1 B1 B0")).memory_bytes == (10, 20, 20, 10, 30, 10)


def test_a_fused_backward_releases_on_the_way_only_what_goes() -> None:
    node = Node("a", saved=(0,), output_bytes=10, backward_workspace_bytes=10, backward_release_bytes=10)
    assert simulate(Graph((node,)), Schedule.parse("F0 B0 D0")).memory_bytes[1] == 20
    later = Graph((node, Node("b", inputs=(0,), output_bytes=10)))
    assert simulate(later, Schedule.parse("F0 F1 D1 B1 B0 D0")).memory_bytes[4] == 20


def test_a_fused_backward_holds_a_gradient_that_is_passed_on_elsewhere() -> None:
    nodes = (
        Node("a", output_bytes=10),
        Node("b", inputs=(0,), output_bytes=10, backward_shared_bytes=10),
        Node("c", inputs=(0, 1), output_bytes=10, shares_gradient=(0, 1)),
    )
    schedule = Schedule.parse("F0 F1 F2 D0 D1 D2 B2 B1 B0")
    assert simulate(Graph(nodes), schedule).memory_bytes[6:] == (10, 30, 10)
    alone = replace(nodes[2], shares_gradient=(1,))
    assert simulate(Graph((*nodes[:2], alone)), schedule).memory_bytes[6:] == (20, 30, 10)


def test_what_a_fused_backward_releases_depends_on_whether_its_gradient_is_held() -> None:
    own = {"backward_release_bytes": 1, "backward_shared_bytes": 10, "backward_shared_release_bytes": 7}
    nodes = (
        Node("a", output_bytes=10),
        Node("b", inputs=(0,), saved=(1,), output_bytes=10, **own),
        Node("c", inputs=(0, 1), output_bytes=10, shares_gradient=(0, 1)),
    )
    alone = (*nodes[:2], replace(nodes[2], shares_gradient=(1,)))
    # Its output, the gradient of it and the one that it makes; where c makes one for a, that too.
    goes, stays = Schedule.parse("F0 F1 F2 D0 D2 B2 B1 D1 B0"), Schedule.parse("F0 F1 F2 D0 D2 B2 B1 B0 D1")
    assert simulate(Graph(nodes), goes).memory_bytes[6] == 30 + 10 - 7
    assert simulate(Graph(nodes), stays).memory_bytes[6] == 30 + 10
    assert simulate(Graph(alone), goes).memory_bytes[6] == 40 - 1
    assert simulate(Graph(alone), stays).memory_bytes[6] == 40


@pytest.mark.slow
@given(st.data())
def test_random_schedules_are_valid_and_consistent(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    schedule = data.draw(schedules(graph))
    simulation = simulate(graph, schedule)
    assert simulation.peak_bytes == max(simulation.memory_bytes)
    assert len(simulation.memory_bytes) == len(schedule)
    assert simulation.memory_bytes[simulation.peak_position] == simulation.peak_bytes
    runs = sum(graph.nodes[a.node].forward_seconds for a in schedule if a.kind == "F")
    backwards = sum(n.backward_seconds for n in graph.nodes)
    assert simulation.seconds == runs + backwards
    assert simulation.recompute_seconds == runs - sum(n.forward_seconds for n in graph.nodes)
    kept = simulate(graph, schedule, gradients="kept")
    assert kept.peak_bytes >= simulation.peak_bytes


@pytest.mark.slow
@given(st.data())
def test_liveness_never_costs_memory_or_time(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    schedule = data.draw(schedules(graph))
    before, tight = simulate(graph, schedule), apply_liveness(graph, schedule)
    after = simulate(graph, tight)
    assert after.peak_bytes <= before.peak_bytes
    assert after.seconds == before.seconds
    assert apply_liveness(graph, tight) == tight


def test_a_loss_may_let_go_of_all_outputs_once_it_has_made_their_gradients() -> None:
    nodes = (
        Node("a", output_bytes=10, gradient_bytes=10),
        Node("b", inputs=(0,), output_bytes=20, gradient_bytes=5, backward_workspace_bytes=40),
    )
    graph = Graph(nodes, input_bytes=1, outputs=(0, 1))
    schedule = Schedule.parse("F0 F1 D1 D0 B1 B0")
    held, let_go = (simulate(graph, schedule, holds_outputs=holds) for holds in (True, False))
    # Before the backward of b both outputs and both gradients are alive; during it, its workspace and a gradient of a.
    assert held.memory_bytes[-2:] == (1 + 30 + 15 + 10 + 40, 1 + 10 + 10)
    assert let_go.memory_bytes[-2:] == (1 + 15 + 10 + 40, 1 + 10)
    light = Graph((nodes[0], replace(nodes[1], backward_workspace_bytes=0)), input_bytes=1, outputs=(0, 1))
    assert simulate(light, schedule, holds_outputs=False).peak_bytes == 1 + 30 + 15
