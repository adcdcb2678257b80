"""Stretches of recomputation by `torch.compile`, where that is asked for: a few kernels instead of many calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ..operations.evaluation import Stretch, only_written, slots
from ..operations.operation import Operation
from .instructions import Do, Instruction
from .program import Program
from .stretches import Again, Part, Stretches


class StretchCompiler:
    """Compiles the stretches of programs; those that do the same, as in repeated blocks, are compiled once.

    Args:
        **options: Keyword arguments of `torch.compile`.

    Attributes:
        num_stretches: How many have been handed over.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        self.num_stretches = 0

    def compiled(self, program: Program) -> Program:
        """The program with compiled stretches, which it will also have once something rests."""
        found = replace(self._compiled(program), learned={}, variants=[], finished=self._compiled)
        found.variants.append(found)
        return found

    def _compiled(self, program: Program) -> Program:
        traced, slot_of = program.traced, slots(program.traced)
        stretches = Stretches(traced, slot_of, program.rests, program.differentiable)
        bodies = {n for n, value in traced.fetched().items() if not isinstance(value, Tensor)}
        before = tuple(
            tuple(self._part(part, bodies, stretches) for part in _without_attended(parts, program, stretches))
            for parts in program.before
        )
        return replace(program, before=before)

    def _part(self, part: Part, bodies: set[fx.Node], stretches: Stretches) -> Part:
        if not isinstance(part, Again):
            return part
        operations = [stretches.traced.operations[n] for what, n in part.instructions if what is Do.RUN_AGAIN]
        if any(i in bodies for o in operations for i in _read_by(o)):
            return part  # the body of a function is no value that a call could be given
        left, needed = _left_to_do(part.instructions)
        made = tuple(p for n in needed for p in stretches.traced.operations[n].outputs)
        graph, read = _extracted(operations, made)
        module = fx.GraphModule({}, graph)
        key = module.code, tuple(n.target for n in graph.nodes)  # a name in the code may be that of two functions
        if key not in self._functions:
            self._functions[key] = torch.compile(module, **self._options)
        self.num_stretches += 1
        slot_of = stretches.slot_of
        slots_read, slots_made = tuple(slot_of[n] for n in read), tuple(slot_of[p] for p in made)
        running = _running(self._functions[key], slots_read, slots_made, stretches.compiled(left, is_first=False))
        return replace(part, run=running)


def _without_attended(parts: tuple[Part, ...], program: Program, stretches: Stretches) -> Iterator[Part]:
    """The parts, with what brings a tape or draws between stretches: a compiled call could not tell where it begins."""
    for part in parts:
        again = {n for what, n in part.instructions if what is Do.RUN_AGAIN} if isinstance(part, Again) else set[int]()
        if isinstance(part, Again) and (apart := again & (part.attended | program.rests.tapes.keys())):
            external, seen = [step.external for step in program.steps], frozenset(program.seen)
            yield from stretches.of_backward(
                part.instructions, again - apart, external.__getitem__, seen, program.hooked
            )
        else:
            yield part


def _recomputed(operation: Operation) -> tuple[fx.Node, ...]:
    return tuple(p for p in operation.parts if p not in operation.effects)


def _read_by(operation: Operation) -> list[fx.Node]:
    return [i for p in _recomputed(operation) for i in p.all_input_nodes if i not in operation.parts]


def _left_to_do(instructions: Iterable[Instruction]) -> tuple[list[Instruction], Iterable[int]]:
    """What a stretch leaves to do when its operations have run, and those of them whose outputs are needed for it.

    What it makes and lets go of is in no table; by what it makes something may be filled before.
    """
    left: list[Instruction] = []
    made: dict[int, None] = {}
    filled: set[int] = set()
    for what, n in instructions:
        if what is Do.RUN_AGAIN:
            made[n] = None
        elif what is Do.DROP and n in made and n not in filled:
            del made[n]
        else:
            left.append((what, n))
            filled |= {n} if what is Do.FILL else set()
    return left, made


def _running(function: Callable[..., Any], read: tuple[int, ...], made: tuple[int, ...], left: Stretch) -> Stretch:
    """The stretch that calls a function.

    Args:
        function: Of what it reads; returns what it makes.
        read: Where that is in the table.
        made: Where the results belong.
        left: What is to be done with them, and with others.
    """

    def run(values: list[Any], tapes: dict[int, Any], _attendant: object = None) -> None:
        results = function(*[values[slot] for slot in read])
        for slot, value in zip(made, results, strict=True):
            values[slot] = value
        del results
        left(values, tapes)

    return run


def _extracted(operations: Sequence[Operation], made: Iterable[fx.Node]) -> tuple[fx.Graph, tuple[fx.Node, ...]]:
    """A stretch as a graph of its own, with names that tell nothing of where it was; what it reads."""
    own = {p for o in operations for p in o.parts}
    read = tuple(dict.fromkeys(i for o in operations for i in _read_by(o) if i not in own))
    graph = fx.Graph()
    found = {n: graph.placeholder(f"a{k}") for k, n in enumerate(read)}
    for operation in operations:
        seen = found | {n: graph.call_function(torch.empty_like, (found[n],)) for n in only_written(operation)}
        for part in _recomputed(operation):
            args, kwargs = fx.map_arg((part.args, part.kwargs), seen.__getitem__)
            found[part] = seen[part] = graph.create_node(part.op, part.target, args, kwargs)
    graph.output(tuple(found[p] for p in made))
    return graph, read
