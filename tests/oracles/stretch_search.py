"""All ways to join stretches of recomputations of a tiny schedule, by the simulator's word alone."""

from collections.abc import Iterator
from typing import NamedTuple

from lightning_remat import Graph, Schedule, ScheduleError, simulate
from lightning_remat.schedules.schedule import Action


class Residency(NamedTuple):
    """An output or a tape from the run that makes it to its discard, and who uses it until then."""

    discard: Action
    uses: set[int]  # numbers of runs and backwards


def stretches(schedule: Schedule) -> list[list[int]]:
    """Of recomputations after the first backward, when all have run: numbers among the runs and backwards."""
    found: list[list[int]] = []
    seen: set[int] = set()
    is_backward = is_open = False
    for number, (kind, n) in enumerate(a for a in schedule if a.kind in "FB"):
        if kind == "B":
            is_backward, is_open = True, False
        elif n not in seen or not is_backward:
            seen.add(n)
            found, is_open = [], False
        else:
            if not is_open:
                found.append([])
            found[-1].append(number)
            is_open = True
    return found


def fewest(graph: Graph, schedule: Schedule, limit: int) -> tuple[int, bool]:
    """To how few stretches those of a schedule can be joined, consecutive ones each, within a peak.

    Returns:
        How few, and whether each group that fits fits as well if it begins later or ends earlier.
    """
    parts = stretches(schedule)
    count = len(parts)
    fits = {
        (i, j): _peak(graph, joined(graph, schedule, [range(i, j + 1)])) <= limit
        for i in range(count)
        for j in range(i, count)
    }
    is_monotone = all(fits[i, j - 1] and fits[i + 1, j] for (i, j), is_fit in fits.items() if is_fit and i < j)
    fitting = (groups for groups in _groupings(0, count) if all(fits[group[0], group[-1]] for group in groups))
    return min(map(len, fitting)), is_monotone


def _groupings(first: int, count: int) -> Iterator[list[range]]:
    if first == count:
        yield []
    for end in range(first + 1, count + 1):
        yield from ([range(first, end), *rest] for rest in _groupings(end, count))


def _peak(graph: Graph, schedule: Schedule) -> float:
    try:
        return simulate(graph, schedule).peak_bytes
    except ScheduleError:
        return float("inf")


def joined(graph: Graph, schedule: Schedule, groups: list[range]) -> Schedule:
    """The schedule with the stretches of each group at the end of its first, and discards after last uses."""
    parts, actions = stretches(schedule), [a for a in schedule if a.kind in "FB"]
    order = list(range(len(actions)))
    for group in groups:
        moved = [number for k in group[1:] for number in parts[k]]
        order = [number for number in order if number not in moved]
        place = order.index(parts[group[0]][-1]) + 1
        order[place:place] = moved
    found: list[Action] = []
    lives = _residencies(graph, schedule)
    for at, number in enumerate(order):
        found.append(actions[number])
        done = {*order[: at + 1]}
        found += [life.discard for life in lives if number in life.uses and life.uses <= done]
    return Schedule(tuple(found))


def _residencies(graph: Graph, schedule: Schedule) -> list[Residency]:
    """Of the outputs and tapes of a schedule."""
    found: list[Residency] = []
    users: dict[Action, set[int]] = {}
    number = 0
    for action in schedule:
        kind, n = action
        if kind in "DT":
            found.append(Residency(action, users.pop(action)))
            continue
        node = graph.nodes[n]
        for i in graph.reads[n] if kind == "F" else node.saved:
            users[Action("D", i)].add(number)
        made = [Action("D", n)] if kind == "F" else []
        for what in [*made, Action("T", n)] if node.tape_bytes else made:
            users.setdefault(what, set()).add(number)
        number += 1
    return found
