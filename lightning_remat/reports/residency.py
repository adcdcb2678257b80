"""What is alive in a training step, value by value and moment by moment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from ..lowering import keep_everything
from ..plans.plan import Plan, StepPlan
from ..plans.step_memory import Timeline
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from ..schedules.simulator import simulate


@dataclass(frozen=True, slots=True)
class Stay:
    """A stretch of a step in which a value is alive.

    Attributes:
        node: The operation that made it.
        is_tape: Whether it is what only that operation's backward reads, and not its output.
        num_bytes: Its size.
        start: Position of the action that makes it.
        end: Position of the first action in which it is gone.
    """

    node: int
    is_tape: bool
    num_bytes: int
    start: int
    end: int


def stays(graph: Graph, schedule: Schedule) -> list[Stay]:
    """When each output and each tape is alive; a view keeps what it views, the caller an output of the graph.

    >>> from lightning_remat import Node
    >>> graph = Graph((Node("relu", kind="relu", inputs=(), saved=(0,), output_bytes=4),))
    >>> stays(graph, Schedule.parse("F0 B0 D0"))
    [Stay(node=0, is_tape=False, num_bytes=4, start=0, end=2)]
    """
    found: list[Stay] = []
    holders: dict[int, int] = {}  # start of a storage's stay -> how many resident outputs live in it
    output: dict[int, int] = {}  # node -> start of the stay that its resident output is part of
    owner: dict[int, int] = {}  # start of a stay -> the node that made it
    tape: dict[int, int] = {}
    held: dict[int, int] = {}
    done: set[int] = set()

    def release(start: int, position: int) -> None:
        holders[start] -= 1
        if not holders[start] and (size := graph.nodes[owner[start]].output_bytes):
            found.append(Stay(owner[start], False, size, start, position))

    for position, (kind, n) in enumerate(schedule.actions):
        node = graph.nodes[n]
        if kind == "F":
            if n not in output:
                start = position if node.storage_of is None else output[node.storage_of]
                if node.storage_of is None:
                    owner[start], holders[start] = n, 0
                output[n] = start
                holders[start] += 1
                if n in graph.outputs and n not in held and n not in done:
                    held[n] = start
                    holders[start] += 1
            if node.tape_bytes:
                tape.setdefault(n, position)
        elif kind == "B":
            done.add(n)
            if n in held:
                release(held[n], position + 1)
        elif kind == "D":
            release(output.pop(n), position)
        else:
            found.append(Stay(n, True, node.tape_bytes, tape.pop(n), position))
    return sorted(found, key=lambda stay: (stay.start, stay.node))


@dataclass(frozen=True, slots=True)
class StepView:
    """A training step laid out in time: what runs, how much is alive, and which values.

    Attributes:
        plan: The step's operations and schedule as one.
        timeline: Bytes and seconds of each action.
        ends: Seconds from the start of the step to the end of each action.
        stays: What is alive when.
    """

    plan: Plan
    timeline: Timeline
    ends: tuple[float, ...]
    stays: tuple[Stay, ...]

    @property
    def peak_position(self) -> int:
        """The action at which forward and backward peak."""
        return self.timeline.memory_bytes.index(max(self.timeline.memory_bytes))


def view_step(step: StepPlan) -> StepView:
    """The step as it was planned."""
    made, timeline = step.as_plan(step.plans[step.keys[0]].planner), step.timeline
    return StepView(made, timeline, tuple(accumulate(timeline.seconds)), tuple(stays(made.graph, made.schedule)))


def plain_step(step: StepPlan) -> StepPlan:
    """The same step without recomputation, and with units gathered as the user has set them."""
    plans: dict[str, Plan] = {}
    for key, graph in step.graphs.items():
        schedule = keep_everything(graph)
        cost = simulate(graph, schedule)
        own = replace(step.plans[key], planner="keep_all", graph=graph, schedule=schedule, simulation=cost, plain=cost)
        plans[key] = own
    return replace(step.planned(plans), surroundings=step.surroundings.plain)


@dataclass(frozen=True, slots=True)
class Contents:
    """What the bytes alive at one moment of a step are.

    Attributes:
        model_bytes: Parameters and buffers of the rematerialized modules.
        gradient_bytes: Gradients of their parameters; of units under `fully_shard`, what is gathered too.
        outside_bytes: The rest of the step: optimizer state, other modules, buckets, corrections.
        input_bytes: The batch; in a step of several parts all that comes into these.
        activation_bytes: Outputs and tapes of operations.
        working_bytes: Gradients of activations, workspaces and whatever else is there only now.
    """

    model_bytes: int
    gradient_bytes: int
    outside_bytes: int
    input_bytes: int
    activation_bytes: int
    working_bytes: int


def contents_at(step: StepPlan, view: StepView, position: int) -> Contents:
    """What is alive during an action."""
    around, total = step.surroundings, view.timeline.memory_bytes[position]
    model = sum(made.graph.static_bytes for made in step.plans.values())
    gradients = view.timeline.gradient_bytes[position]
    inputs = view.plan.graph.input_bytes + view.timeline.handed_on_bytes[position]
    outside = around.resident_bytes + around.correction_bytes
    if outside < 0:  # what comes into a part of the step may be what another makes, and lives once
        inputs, outside = inputs + outside, 0
    activations = sum(stay.num_bytes for stay in view.stays if stay.start <= position < stay.end)
    rest = total - model - gradients - inputs - outside - activations
    return Contents(model, gradients, outside, inputs, activations, max(0, rest))
