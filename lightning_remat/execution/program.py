"""A schedule compiled for the executor: what to do before each backward, checked against autograd's order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from ..capture.tracer import TracedModule
from ..errors import ScheduleError
from ..schedules.schedule import Action, Schedule, mark


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What the executor follows; holds no module, so that it can be shared by copies of one.

    Attributes:
        traced: The operations.
        schedule: The actions.
        forward: The actions of the forward, its last discards included.
        backwards: The operations in the order of their backwards.
        before: For each entry of `backwards`, the actions that stand right before it.
        place: For each operation, its place in `backwards`.
        released: For each operation, what is discarded right after its backward: (`"D"` or `"T"`, operation).
        revived: The operations that run again before the first backward.
        constants_after: For each operation, the constants (shapes) that become known with it; -1: with the inputs.
        written: Names of the buffers that operations write.
    """

    traced: TracedModule
    schedule: Schedule
    forward: tuple[Action, ...]
    backwards: tuple[int, ...]
    before: tuple[tuple[Action, ...], ...]
    place: tuple[int, ...]
    released: tuple[frozenset[tuple[str, int]], ...]
    revived: frozenset[int]
    constants_after: dict[int, tuple[fx.Node, ...]]
    written: frozenset[str]

    def __deepcopy__(self, memo: Any) -> Program:
        return self  # immutable, and bound to no module

    def __reduce__(self) -> Any:
        return _nothing, ()  # pickling a rewritten module yields the plain module


def _nothing() -> None:
    return None


def compile_schedule(traced: TracedModule, schedule: Schedule) -> Program:
    """The program of a valid schedule.

    Args:
        traced: The operations.
        schedule: Valid on the graph of these operations, as `simulate` judges.

    Raises:
        ScheduleError: Backwards are not in autograd's order, the reverse of that of the first runs.
    """
    first_runs: list[int] = []
    has_run: set[int] = set()
    forward: list[Action] = []
    revived: set[int] = set()
    pending: list[Action] = []
    before: list[tuple[Action, ...]] = []
    backwards: list[int] = []
    for position, action in enumerate(schedule):
        kind, n = action
        is_complete = len(first_runs) == len(traced.operations)
        if kind == "B":
            expected = first_runs[len(first_runs) - 1 - len(backwards)]
            if not is_complete or n != expected:
                raise ScheduleError(
                    f"{mark(schedule, position)}\naction {position}: autograd runs backwards in the reverse order of "
                    f"the first runs, all of which come first; here it runs B{expected}",
                    position=position,
                )
            before.append(tuple(pending))
            pending = []
            backwards.append(n)
        elif is_complete and (kind == "F" or pending or backwards):
            pending.append(action)  # the loss stands between the forward and these
        else:
            forward.append(action)
            if kind == "F" and n in has_run:
                revived.add(n)
            elif kind == "F":
                has_run.add(n)
                first_runs.append(n)
    place = [0] * len(backwards)
    released: list[frozenset[tuple[str, int]]] = [frozenset()] * len(backwards)
    for k, n in enumerate(backwards):
        place[n] = k
        following = before[k + 1] if k + 1 < len(before) else tuple(pending)
        released[n] = _leading_discards(following)
    return Program(
        traced,
        schedule,
        tuple(forward),
        tuple(backwards),
        tuple(before),
        tuple(place),
        tuple(released),
        frozenset(revived),
        _constants_after(traced, first_runs),
        frozenset(name for operation in traced.operations for name in operation.mutates),
    )


def _leading_discards(actions: tuple[Action, ...]) -> frozenset[tuple[str, int]]:
    found: set[tuple[str, int]] = set()
    for kind, n in actions:
        if kind == "F":
            break
        found.add((kind, n))
    return frozenset(found)


def _constants_after(traced: TracedModule, order: list[int]) -> dict[int, tuple[fx.Node, ...]]:
    rank = {n: k for k, n in enumerate(order)}
    ready: dict[fx.Node, int] = {}
    after: dict[int, list[fx.Node]] = {}
    for constant in traced.constants:
        known = [ready.get(i, traced.producer.get(i, -1)) for i in constant.all_input_nodes]
        ready[constant] = max(known, key=lambda n: rank.get(n, -1), default=-1)
        after.setdefault(ready[constant], []).append(constant)
    return {n: tuple(constants) for n, constants in after.items()}
