"""An operation as a function: its parts as straight-line Python, compiled once, as fx does for whole graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.nn.functional import batch_norm
from torch.utils._pytree import tree_map_only

from ..module_state.ambient import set_grad_enabled
from .contexts import Context, common_contexts, contexts_of
from .operation import Operation, TracedModule
from .saved_tensors import tensors_of


class Values(Protocol):
    """What an operation reads its inputs from, by the numbers that `slots` gives to fx nodes."""

    def __getitem__(self, slot: int, /) -> Any: ...


Run = Callable[[Values], tuple[Any, ...]]
"""Runs an operation: the values of its outputs, those of its effects included in a first run."""


class Attendant(Protocol):
    """Is told when an operation begins of which more than its outputs is wanted, and when it has ended."""

    def begin(self, n: int, /) -> None: ...

    def end(self, n: int, /) -> None: ...


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
        asking: By these numbers, what asks for gradients, see `Differentiable`: known once all have run for the first
            time.
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
    with_gradients: Mapping[str, WithGradients] = MappingProxyType({}),
) -> Stretch:
    """One function for operations that run one after another, as fx makes one for a whole graph.

    What is made and let go of within the stretch enters the table of values only where an operation sees it that is
    attended, or runs again with gradients.

    Args:
        stretch: In order; slots and tapes of which nobody reads any more.
        slot_of: See `slots`.
        is_first: A first run has the effects too, and is run with gradients; a recomputation has none, is run without,
            and what it makes is cut from its graph.
        attended: The names of the operations whose beginning and end the attendant is told, and by what numbers.
        with_gradients: Those whose recomputations run with gradients. Of one that is attended, too, the attendant sees
            to that.
    """
    stretch = list(stretch)
    watched = attended.keys() if is_first else attended.keys() | with_gradients.keys()
    seen = {n for item in stretch if isinstance(item, Operation) and item.name in watched for n in _seen_by(item)}
    drops = ((_dropped(item), position) for position, item in enumerate(stretch))
    last_drop = {slot: position for slot, position in drops if slot is not None}
    writer = _Writer(slot_of)
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
        number = attended.get(item.name) if isinstance(item, Operation) else None
        graph = with_gradients.get(item.name) if isinstance(item, Operation) and not is_first else None
        begin, end = _around(writer, number, graph)
        body += begin
        body += [line for part in parts for line in writer.lines(part)]
        temporary = [writer.locals.pop(p) for p in parts if p not in outputs]
        if temporary:
            body.append(f"del {', '.join(temporary)}")
        if graph is not None and graph.lines is not None:
            body += graph.lines(writer.constant, writer.locals[outputs[0]])
        if not is_first and (number is not None or graph is not None):
            body += [*_without_doubles(writer, outputs), *end]
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


def _around(writer: _Writer, number: int | None, graph: WithGradients | None) -> tuple[Iterable[str], Iterable[str]]:
    """The lines before an operation, and those after it."""
    if number is not None:
        return [f"attendant.begin({number})"], [f"attendant.end({number})"]
    if graph is None:
        return [], []
    asking, ask, switch = map(writer.constant, (graph.asking, ask_for_gradients, set_grad_enabled))
    before = [f"for slot, leaf in {asking}.get({graph.number}, ()): {ask}(v[slot], leaf)", f"{switch}(True)"]
    return before, [f"{switch}(False)"]


def _without_doubles(writer: _Writer, outputs: Sequence[fx.Node]) -> Iterable[str]:
    """Puts what a recomputation made into the table, unless it is there and the recomputation was for its tape."""
    if outputs:
        cut, found = writer.constant(leaf_of), [(writer.slot_of[n], writer.locals.pop(n)) for n in outputs]
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
    writer = _Writer(slot_of, len(common))
    writer.scratch = scratch
    body = [line for part in parts for line in writer.lines(part)]
    body += writer.cutting(cut)
    returned = "".join(f"{writer.name_of(n)}, " for n in outputs)
    return writer.function([*body, f"return ({returned})"], f"operation {name}")


class _Writer:
    """Writes nodes as lines of Python; whatever is no plain number gets a name.

    The outermost `depth` contexts of the nodes are entered already; in place of what is `scratch` stands new memory.
    """

    def __init__(self, slot_of: Mapping[fx.Node, int], depth: int = 0) -> None:
        self.slot_of, self.depth = slot_of, depth
        self.namespace: dict[str, Any] = {}
        self.locals: dict[fx.Node, str] = {}
        self.num_locals = 0
        self.scratch: frozenset[fx.Node] = frozenset()
        self.tabled: set[fx.Node] = set()  # of the local ones, what is in the table too

    def function(self, body: list[str], name: str) -> Callable[..., Any]:
        """The function of a table of values, of tapes and of an attendant that consists of these lines."""
        source = "\n".join(["def run(v, tapes=None, attendant=None):", *(f"    {line}" for line in body)])
        exec(compile(source, f"<{name}>", "exec"), self.namespace)
        return self.namespace["run"]

    def cutting(self, nodes: Collection[fx.Node]) -> list[str]:
        """The lines that cut local values from their graphs."""
        cut = self.constant(leaf_of) if nodes else ""
        return [f"{t} = {cut}({t})" for t in (self.locals[n] for n in nodes)]

    def value_in(self, slot: int) -> str:
        """The name of a value: a local one, or in the table."""
        local = self._local_in(slot)
        return f"v[{slot}]" if local is None else self.locals[local]

    def noting(self, slot: int) -> list[str]:
        """The line that tells the table of another local value, if it has the one before."""
        local = self._local_in(slot)
        return [f"v[{slot}] = {self.locals[local]}"] if local in self.tabled else []

    def _local_in(self, slot: int) -> fx.Node | None:
        return next((n for n in self.locals if self.slot_of.get(n) == slot), None)

    def forget(self, slot: int) -> str:
        """The line that lets go of a value."""
        local = self._local_in(slot)
        gone = [] if local is None else [f"del {self.locals.pop(local)}"]
        return "; ".join(gone if local is not None and local not in self.tabled else [*gone, f"v[{slot}] = None"])

    def lines(self, n: fx.Node) -> Iterable[str]:
        """The call, within its contexts."""
        args = [self.argument(a) for a in n.args]
        kwargs = [f"**{{{key!r}: {self.argument(a)}}}" for key, a in n.kwargs.items()]  # `from` is a name too
        if n.op == "call_method":
            call = f"{args[0]}.{n.target}({', '.join([*args[1:], *kwargs])})"
        else:
            call = f"{self.constant(n.target)}({', '.join([*args, *kwargs])})"
        name = self.locals[n] = f"t{self.num_locals}"
        self.num_locals += 1
        contexts = [f"{self.constant(c.enter)}()" for c in contexts_of(n)[self.depth :]]
        if contexts:
            yield f"with {', '.join(contexts)}: {name} = {call}"
        else:
            yield f"{name} = {call}"

    def name_of(self, n: fx.Node) -> str:
        """A node's value: of this function, or from outside."""
        if n in self.scratch:
            return f"{self.constant(torch.empty_like)}(v[{self.slot_of[n]}])"
        return self.locals.get(n) or f"v[{self.slot_of[n]}]"

    def argument(self, a: Any) -> str:
        """An argument, which may be nested."""
        if isinstance(a, fx.Node):
            return self.name_of(a)
        if type(a) in (tuple, torch.Size):
            return f"({''.join(f'{self.argument(b)}, ' for b in a)})"
        if type(a) in (list, immutable_list):
            return f"[{''.join(f'{self.argument(b)}, ' for b in a)}]"
        if type(a) in (dict, immutable_dict):
            return "{" + "".join(f"{self.constant(k)}: {self.argument(b)}, " for k, b in a.items()) + "}"
        if type(a) is slice:
            s = cast(Any, a)
            return f"slice({self.argument(s.start)}, {self.argument(s.stop)}, {self.argument(s.step)})"
        if a is None or type(a) in (bool, int):
            return repr(a)
        return self.constant(a)

    def constant(self, value: Any) -> str:
        """A name for a value that the source cannot spell."""
        name = f"c{len(self.namespace)}"
        self.namespace[name] = value
        return name


def leaf_of(value: Any) -> Any:
    """The value cut from its graph, asking for gradients where it did."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(True) if value.requires_grad else value.detach()
    if value is None:
        return None
    if type(value) is tuple:  # as most operations return that return several
        return tuple([leaf_of(item) for item in cast("tuple[Any, ...]", value)])
    return tree_map_only(Tensor, leaf_of, value)


def detached(value: Any) -> Any:
    """The same value with every tensor cut from its autograd graph."""
    if isinstance(value, Tensor):
        return value.detach()
    return tree_map_only(Tensor, lambda t: t.detach(), value)


Differentiable = tuple[int, int]
"""A tensor that asks for gradients: its slot, and which of the tensors there it is, -1 for the value itself."""


def differentiable_in(slot: int, value: Any) -> list[Differentiable]:
    """What asks for gradients in a value."""
    if isinstance(value, Tensor):
        return [(slot, -1)] if value.requires_grad else []
    return [(slot, leaf) for leaf, tensor in enumerate(tensors_of([value])) if tensor.requires_grad]


def ask_for_gradients(value: Any, leaf: int) -> None:
    """A tensor in a value asks for gradients from here on."""
    (value if leaf < 0 else tensors_of([value])[leaf]).requires_grad_()
