"""An operation as a function: its parts as straight-line Python, compiled once, as fx does for whole graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from torch import fx
from torch.nn.functional import batch_norm

from ..module_state.ambient import set_grad_enabled
from .contexts import Context, common_contexts
from .leaves import Differentiable, ask_for_gradients, leaf_of
from .lines import Writer
from .operation import Operation, TracedModule


class Values(Protocol):
    """What an operation reads its inputs from, by the numbers that `slots` gives to fx nodes."""

    def __getitem__(self, slot: int, /) -> Any: ...


Run = Callable[[Values], tuple[Any, ...]]
"""Runs an operation: the values of its outputs, those of its effects included in a first run."""


class Attendant(Protocol):
    """Is told when an operation begins of which more than its outputs is wanted, and when it has ended.

    Of one that only draws random numbers by methods of their own, as these are many.
    """

    def begin(self, n: int, /) -> None: ...

    def end(self, n: int, /) -> None: ...

    def draw(self, n: int, /) -> None: ...

    def drawn(self) -> None: ...


class Stretch(Protocol):
    """Runs operations on the table of values, and puts there what is read later; lets go of tapes."""

    def __call__(self, values: list[Any], tapes: dict[int, Any], attendant: Attendant | None = None, /) -> None: ...


@dataclass(frozen=True, slots=True)
class TapeOf:
    """The tape of an operation, to let go of.

    Attributes:
        number: That of the operation.
    """

    number: int


Constant = Callable[[Any], str]
"""A name in the function that is written for a value that its source cannot spell."""

Lines = Callable[[Constant, str], Iterable[str]]
"""What the function does with a value of that name."""


@dataclass(frozen=True, slots=True)
class OnValue:
    """Something that is done with a value.

    Attributes:
        slot: Its number.
        lines: What is done.
        is_last: Whether the slot is let go of then.
    """

    slot: int
    lines: Lines
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class WithGradients:
    """How an operation runs again with gradients, whether others around it do or not, as its first run did.

    Attributes:
        number: That of the operation.
        asking: By these numbers, what asks for gradients, see `Differentiable`: known, when the function runs, once all
            have run for the first time; what is known when it is compiled stands in it.
        lines: What is done with what it made, while autograd holds what it saved.
    """

    number: int
    asking: Mapping[int, Iterable[Differentiable]]
    lines: Lines | None


Item = Operation | fx.Node | int | TapeOf | OnValue
"""Of a stretch: an operation to run, a constant (a node without tensors) to compute, a slot or a tape to let go of, or
what is done with a value."""


def slots(traced: TracedModule) -> dict[fx.Node, int]:
    """A number for every fx node whose value is read beyond its own operation: placeholders first, in order."""
    inner = {
        part
        for o in traced.operations
        for part in o.parts
        if part not in o.outputs and not (part in o.effects and any(u not in o.parts for u in part.users))
    }
    return {n: k for k, n in enumerate(n for n in traced.fx_graph.nodes if n.op != "output" and n not in inner)}


def effect_outputs(operation: Operation) -> tuple[fx.Node, ...]:
    """The effects whose values other operations, or the caller, read: they live outside, as what is written does."""
    return tuple(
        n for n in operation.parts if n in operation.effects and any(u not in operation.parts for u in n.users)
    )


def only_written(operation: Operation) -> frozenset[fx.Node]:
    """The buffers on which no result of it depends: batch norm in training only writes its statistics."""
    parts = [p for p in operation.parts if p not in operation.effects]
    return frozenset(
        buffer
        for buffer in operation.writes
        if all(p.target is batch_norm and p.args[5:6] == (True,) for p in parts if buffer in p.all_input_nodes)
    )


def compile_operation(operation: Operation, slot_of: Mapping[fx.Node, int], *, is_first: bool) -> Run:
    """The function that runs the operation, in the contexts that its parts have in common.

    Args:
        operation: What to run.
        slot_of: See `slots`.
        is_first: A first run has the effects too, and returns those that others read after the outputs; a
            recomputation leaves them out, and writes what it only writes into memory that goes at once.
    """
    parts = [p for p in operation.parts if is_first or p not in operation.effects]
    outputs = [*operation.outputs, *(effect_outputs(operation) if is_first else ())]
    scratch = frozenset[fx.Node]() if is_first else only_written(operation)
    cut = operation.outputs if operation.is_dead_end else ()
    return _compiled(parts, outputs, slot_of, operation.name, common_contexts(operation.parts), scratch, cut)


def compile_constant(node: fx.Node, slot_of: Mapping[fx.Node, int]) -> Run:
    """The function that computes a value without tensors; returns it as a tuple of one."""
    return _compiled([node], [node], slot_of, node.name)


def compile_stretch(
    stretch: Iterable[Item],
    slot_of: Mapping[fx.Node, int],
    *,
    is_first: bool,
    attended: Mapping[str, int] = MappingProxyType({}),
    drawing: Mapping[str, int] = MappingProxyType({}),
    with_gradients: Mapping[str, WithGradients] = MappingProxyType({}),
) -> Stretch:
    """One function for operations that run one after another, as fx makes one for a whole graph.

    What is made and let go of within the stretch enters the table of values only where an operation sees it that is
    attended, or runs again with gradients and may ask for more than is known yet.

    Args:
        stretch: In order; slots and tapes of which nobody reads any more.
        slot_of: See `slots`.
        is_first: A first run has the effects too, and is run with gradients; a recomputation has none, is run without,
            and what it makes is cut from its graph.
        attended: The names of the operations whose beginning and end the attendant is told, and by what numbers.
        drawing: Those of which it is told only that they draw.
        with_gradients: Those whose recomputations run with gradients. Of one that is attended, too, the attendant sees
            to that.
    """
    stretch = list(stretch)
    asking = [] if is_first else [name for name, graph in with_gradients.items() if graph.number not in graph.asking]
    watched = attended.keys() | asking
    seen = {n for item in stretch if isinstance(item, Operation) and item.name in watched for n in _seen_by(item)}
    drops = ((_dropped(item), position) for position, item in enumerate(stretch))
    last_drop = {slot: position for slot, position in drops if slot is not None}
    last_read = {slot: position for position, item in enumerate(stretch) for slot in _read(item, slot_of)}
    writer = Writer(slot_of)
    body: list[str] = []
    for position, item in enumerate(stretch):
        if isinstance(item, int):
            body.append(writer.forget(item))
            continue
        if isinstance(item, TapeOf):
            body.append(f"tapes.pop({item.number}, None)")
            continue
        if isinstance(item, OnValue):
            body += item.lines(writer.constant, writer.value_in(item.slot))
            body += [writer.forget(item.slot)] if item.is_last else writer.noting(item.slot)
            continue
        parts, outputs = ([item], [item]) if isinstance(item, fx.Node) else (item.parts, item.outputs)
        if not is_first and isinstance(item, Operation):
            parts = [p for p in parts if p not in item.effects]
            writer.scratch = only_written(item)
        name = item.name if isinstance(item, Operation) else ""  # that of a constant may be an operation's, too
        number, draws = attended.get(name), drawing.get(name)
        graph = None if is_first else with_gradients.get(name)
        begin, end = _around(writer, number, draws, graph)
        body += begin
        body += [line for part in parts for line in writer.lines(part)]
        temporary = [writer.locals.pop(p) for p in parts if p not in outputs]
        if temporary:
            body.append(f"del {', '.join(temporary)}")
        if graph is not None and graph.lines is not None:
            body += graph.lines(writer.constant, writer.locals[outputs[0]])
        if not is_first and (number is not None or graph is not None):
            made = [slot_of[n] for n in outputs]
            is_read = any(last_drop.get(k, -1) < position or last_read.get(k, -1) > position for k in made)
            body += [*_without_doubles(writer, outputs, is_read=is_read), *end]
            continue
        if is_first and isinstance(item, Operation) and item.is_dead_end:
            body += writer.cutting(outputs)
        writer.tabled |= {n for n in outputs if n in seen or last_drop.get(slot_of[n], -1) < position}
        body += [f"v[{slot_of[n]}] = {writer.locals[n]}" for n in outputs if n in writer.tabled]
        body += end
    return writer.function(body or ["pass"], "stretch")


def _dropped(item: Item) -> int | None:
    if isinstance(item, OnValue):
        return item.slot if item.is_last else None
    return item if isinstance(item, int) else None


def _read(item: Item, slot_of: Mapping[fx.Node, int]) -> Iterable[int]:
    """The slots that are read for an item of a stretch."""
    if isinstance(item, OnValue):
        return [item.slot]
    parts = item.parts if isinstance(item, Operation) else [item] if isinstance(item, fx.Node) else []
    return [slot_of[i] for part in parts for i in part.all_input_nodes if i in slot_of]


def _around(
    writer: Writer, number: int | None, draws: int | None, graph: WithGradients | None
) -> tuple[list[str], list[str]]:
    """The lines before an operation, and those after it."""
    if number is not None:
        return [f"attendant.begin({number})"], [f"attendant.end({number})"]
    before, after = ([], []) if draws is None else ([f"attendant.draw({draws})"], ["attendant.drawn()"])
    if graph is None:
        return before, after
    ask, switch = map(writer.constant, (ask_for_gradients, set_grad_enabled))
    if (known := graph.asking.get(graph.number)) is None:
        asking = writer.constant(graph.asking)
        asked = [f"for slot, leaf in {asking}.get({graph.number}, ()): {ask}(v[slot], leaf)"]
    else:
        named = [(writer.value_in(slot), leaf) for slot, leaf in known]
        asked = [f"{value}.requires_grad_()" if leaf < 0 else f"{ask}({value}, {leaf})" for value, leaf in named]
    return [*asked, f"{switch}(True)", *before], [*after, f"{switch}(False)"]


def _without_doubles(writer: Writer, outputs: Sequence[fx.Node], *, is_read: bool) -> Iterable[str]:
    """Puts what a recomputation made into the table, unless it is there and the recomputation was for its tape."""
    if outputs:
        cut, found = writer.constant(leaf_of), [(writer.slot_of[n], writer.locals.pop(n)) for n in outputs]
        if is_read:
            yield f"if v[{found[0][0]}] is None: {'; '.join(f'v[{slot}] = {cut}({t})' for slot, t in found)}"
        yield f"del {', '.join(t for _, t in found)}"


def _seen_by(operation: Operation) -> set[fx.Node]:
    return {*operation.outputs, *(i for part in operation.parts for i in part.all_input_nodes)}


def _compiled(
    parts: list[fx.Node],
    outputs: list[fx.Node],
    slot_of: Mapping[fx.Node, int],
    name: str,
    common: tuple[Context, ...] = (),
    scratch: frozenset[fx.Node] = frozenset(),
    cut: Collection[fx.Node] = (),
) -> Run:
    writer = Writer(slot_of, len(common))
    writer.scratch = scratch
    body = [line for part in parts for line in writer.lines(part)]
    body += writer.cutting(cut)
    returned = "".join(f"{writer.name_of(n)}, " for n in outputs)
    return writer.function([*body, f"return ({returned})"], f"operation {name}")
