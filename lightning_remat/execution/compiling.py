"""Stretches of recomputation by `torch.compile`, where that is asked for: a few kernels instead of many calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ..operations.evaluation import Stretch, only_written, slots
from ..operations.operation import Operation, TracedModule
from .instructions import Do, Instruction
from .program import Program
from .stretches import Again, Part, Stretches, needs_gradients


class StretchCompiler:
    """Compiles the stretches of programs; those that do the same, as in repeated blocks, are compiled once.

    Args:
        **options: Keyword arguments of `torch.compile`.

    Attributes:
        num_stretches: How many have been handed over.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self.num_stretches = 0

    def compiled(self, program: Program) -> Program:
        """The program with compiled stretches; what was learned of its saved tensors is shared."""
        traced, slot_of = program.traced, slots(program.traced)
        bodies = {n for n, value in traced.fetched().items() if not isinstance(value, Tensor)}
        before = tuple(
            tuple(self._part(part, bodies, traced, slot_of) for part in _without_attended(parts, program, slot_of))
            for parts in program.before
        )
        # Of what a compiled stretch makes, what lets go of it at once would have to be handed out: nothing rests.
        recomputes = tuple(any(map(needs_gradients, parts)) for parts in before)
        return replace(program, before=before, recomputes=recomputes, variants=[])

    def _part(self, part: Part, bodies: set[fx.Node], traced: TracedModule, slot_of: Mapping[fx.Node, int]) -> Part:
        if not isinstance(part, Again):
            return part
        operations = [traced.operations[n] for what, n in part.instructions if what is Do.RUN_AGAIN]
        if any(i in bodies for o in operations for i in _read_by(o)):
            return part  # the body of a function is no value that a call could be given
        graph, read, made, left = _extracted(operations, part.instructions, traced, slot_of)
        module = fx.GraphModule({}, graph)
        key = module.code, tuple(n.target for n in graph.nodes)  # a name in the code may be that of two functions
        if key not in self._compiled:
            self._compiled[key] = torch.compile(module, **self._options)
        self.num_stretches += 1
        return replace(part, run_unrecorded=_running(self._compiled[key], read, made, left))


def _without_attended(parts: tuple[Part, ...], program: Program, slot_of: Mapping[fx.Node, int]) -> Iterator[Part]:
    """The parts, with what brings a tape or draws between stretches: a compiled call could not tell where it begins."""
    stretches = Stretches(program.traced, slot_of, program.rests)
    for part in parts:
        if isinstance(part, Again) and part.attended:
            others = {n for what, n in part.instructions if what is Do.RUN_AGAIN} - part.attended
            yield from stretches.of_backward(
                part.instructions,
                others,
                frozenset(),
                lambda n: program.steps[n].external,
                program.hooked,
                frozenset(others if part.run_unrecorded is not None else ()),
            )
        else:
            yield part


def _recomputed(operation: Operation) -> tuple[fx.Node, ...]:
    return tuple(p for p in operation.parts if p not in operation.effects)


def _read_by(operation: Operation) -> list[fx.Node]:
    return [i for p in _recomputed(operation) for i in p.all_input_nodes if i not in operation.parts]


def _running(
    function: Callable[..., Any], read: tuple[int, ...], made: tuple[int, ...], left: tuple[Instruction, ...]
) -> Stretch:
    """The stretch that calls a function.

    Args:
        function: Of what it reads; returns what it makes.
        read: Where that is in the table.
        made: Where the results belong.
        left: What is let go of afterwards: slots of values, numbers of operations for their tapes.
    """

    def run(values: list[Any], tapes: dict[int, Any], _attendant: object = None) -> None:
        results = function(*[values[slot] for slot in read])
        for slot, value in zip(made, results, strict=True):
            values[slot] = value
        for what, number in left:
            if what is Do.DROP_TAPE:
                tapes.pop(number, None)
            else:
                values[number] = None

    return run


def _extracted(
    operations: Sequence[Operation],
    instructions: tuple[Instruction, ...],
    traced: TracedModule,
    slot_of: Mapping[fx.Node, int],
) -> tuple[fx.Graph, tuple[int, ...], tuple[int, ...], tuple[Instruction, ...]]:
    """A stretch as a graph of its own, with names that tell nothing of where it was; see `_running` for the rest."""
    own = {p for o in operations for p in o.parts}
    read = tuple(dict.fromkeys(i for o in operations for i in _read_by(o) if i not in own))
    graph = fx.Graph()
    found = {n: graph.placeholder(f"a{k}") for k, n in enumerate(read)}
    for operation in operations:
        seen = found | {n: graph.call_function(torch.empty_like, (found[n],)) for n in only_written(operation)}
        for part in _recomputed(operation):
            args, kwargs = fx.map_arg((part.args, part.kwargs), seen.__getitem__)
            found[part] = seen[part] = graph.create_node(part.op, part.target, args, kwargs)
    made: dict[fx.Node, None] = {}  # and in the table at its end
    left: list[Instruction] = []
    for what, n in instructions:
        outputs = traced.operations[n].outputs
        if what is Do.RUN_AGAIN:
            made.update(dict.fromkeys(outputs))
        elif what is Do.DROP_TAPE:
            left.append((what, n))
        else:
            left += [(what, slot_of[p]) for p in outputs if p not in own]
            for p in outputs:
                made.pop(p, None)
    graph.output(tuple(found[p] for p in made))
    return graph, tuple(slot_of[n] for n in read), tuple(slot_of[p] for p in made), tuple(left)
