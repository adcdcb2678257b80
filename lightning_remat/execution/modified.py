"""Values that were changed in place between a forward and its backward: the error, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..operations.evaluation import slots

T = TypeVar("T")

_changed: WeakKeyDictionary[Any, set[tuple[str, str]]] = WeakKeyDictionary()
"""Code that was captured → names of operations, and of what they read that changed before their backward."""

_looking: list[set[Any]] = []
"""For each run that looks for all that changes, the programs that it has run."""


class ModifiedError(RuntimeError):
    """A backward would use a value other than its forward, as something was changed in place in between."""


def retried(run: Callable[[], T]) -> T:
    """What `run` returns, once more if a value was changed before the backward: from then on it is copied.

    All such values are found by a run in between, in which whatever may change is copied.
    """
    try:
        return run()
    except ModifiedError:
        pass
    programs = set[Any]()
    _looking.append(programs)
    try:
        run()
    finally:
        _looking[:] = [others for others in _looking if others is not programs]
        for program in programs:
            program.suspected.clear()
    return run()


def suspect(program: Any, *, with_all: bool = False) -> None:
    """The buffers that its recomputations read are copied until one has told whether they have changed.

    So it is in graphs that are new to a step that trains, which cannot be run again.

    Args:
        program: Of the graph.
        with_all: Whether so is all that others may write, be it as large as activations, of all operations, which
            second backwards run again.
    """
    places, seen, steps = slots(program.traced), frozenset[int](program.seen), list[Any](program.steps)
    owned = {places[i] for i in program.traced.owned}
    for n, step in enumerate(steps):
        if with_all:
            kept = () if step.is_repeated else step.kept  # else it is copied anyway
            open_to_others = (*step.external, *kept, *(slot for slot in step.inputs if slot in seen))
        else:
            open_to_others = owned.intersection(step.external) if step.is_repeated else ()
        program.suspected.update((n, slot) for slot in open_to_others)


def copies_of(program: Any, values: list[Any]) -> dict[int, list[int]]:
    """What is copied before which operations run for the first time."""
    for programs in _looking:
        programs.add(program)
        suspect(program, with_all=True)
    if program.suspected:
        given = values[: len(program.traced.placeholders)]
        others = _others(program, values) - {slot for slot, value in enumerate(given) if _is_held(value)}
        program.suspected.intersection_update([(n, slot) for n, slot in program.suspected if slot in others])
    found: dict[int, list[int]] = {}
    for n, slot in program.copied | program.suspected:
        found.setdefault(n, []).append(slot)
    return found


def clear_up(execution: Any, n: int) -> None:
    """An operation runs again on copies: whether others have written since its first run is known now."""
    program, step = execution.program, execution.steps[n]
    for slot in execution.copies[n].keys() - (step.kept if step.is_repeated else ()):
        program.suspected.discard((n, slot))
        if (kept := execution.kept_versions.get((n, slot))) is not None:
            before = [kept]
        else:
            before = [execution.versions[slot]] if slot < execution.num_given else execution.output_versions.get(slot)
        if before is not None and execution.values[slot] is not None and execution.versions_of(slot) != before:
            note_change(program, n, slot, execution.values)


def note_change(program: Any, n: int, slot: int, values: list[Any]) -> None:
    """Operation n reads what changes before its backward: its value is copied from now on.

    So it is by other plans, and in graphs that are captured for other inputs. Of a parameter, and of views of one, it
    stays an error, as in a plain run.
    """
    if isinstance(values[slot], Tensor) and slot in _others(program, values):
        program.copied.add((n, slot))
        _changed.setdefault(_origin(program), set()).add((program.steps[n].operation.name, _names(program)[slot]))


def _others(program: Any, values: list[Any]) -> set[int]:
    """The places of what is no parameter that is trained, and lives in none."""
    traced, places = program.traced, slots(program.traced)
    trained = {i for i in traced.placeholders if _is_trained(values[places[i]])}
    homes = {i: traced.operations[n].lives_in for i, n in traced.producer.items()}
    return {slot for i, slot in places.items() if trained.isdisjoint(homes.get(i, {i}))}


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf


def _is_held(value: Any) -> bool:
    """Whether it may be large, and hardly anybody writes it, or is no tensor."""
    return isinstance(value, nn.Parameter) or not isinstance(value, Tensor)


def known_changes(program: Any) -> set[tuple[int, int]]:
    """What is known of the graph of a program, by other programs: operations and places."""
    known = _changed.get(_origin(program), set[tuple[str, str]]())
    steps: list[Any] = list(program.steps if known else ())
    names = _names(program) if known else {}
    found: set[tuple[int, int]] = set()
    for n, step in enumerate(steps):
        name = step.operation.name
        found.update((n, slot) for slot in (*step.external, *step.inputs) if (name, names[slot]) in known)
    return found


def _origin(program: Any) -> Any:
    captured = program.traced.captured
    return captured.code or captured


def _names(program: Any) -> dict[int, str]:
    return {slot: node.name for node, slot in slots(program.traced).items()}


def modified(what: str, version: int, tensor: Tensor) -> ModifiedError:
    """The error of a backward that would use a value other than its forward."""
    return ModifiedError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at "
        f"version {tensor._version}, expected version {version}. Remedy: use the out-of-place operation, or run the "
        "backward before the change"
    )
