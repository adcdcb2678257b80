"""What runs between two operations that need more than their calls becomes one function, compiled once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from ..operations.contexts import contexts_of
from ..operations.evaluation import Item, OnValue, Stretch, TapeOf, WithGradients, compile_stretch
from ..operations.leaves import Differentiable
from ..operations.operation import TracedModule
from .instructions import Do, Instruction
from .resting import Rests


@dataclass(frozen=True, slots=True, eq=False)
class Again:
    """Recomputations as one function, as long as what they read from outside is as it was.

    Attributes:
        run: The function, to be run without gradients; operations that want some see to that.
        instructions: The same, one by one.
        reads: The slots of what is made before and must be there.
        external: The slots of what lies outside.
        seen: Those of `reads` that live where others may write.
        attended: The operations of which more is wanted than their outputs, see `Attended`; random numbers are more.
        hooked: The others of which the table must hold what else was saved.
    """

    run: Stretch
    instructions: tuple[Instruction, ...]
    reads: tuple[int, ...]
    external: tuple[int, ...]
    seen: tuple[int, ...]
    attended: frozenset[int]
    hooked: frozenset[int]


@dataclass(frozen=True, slots=True)
class LetGo:
    """Discards that stand alone.

    Attributes:
        slots: Those of the outputs.
        tapes: The operations whose tapes go.
    """

    slots: tuple[int, ...]
    tapes: tuple[int, ...]


Part = Again | LetGo | Instruction
"""Of what happens before a backward."""


class Stretches:
    """Compiles the instructions of a program.

    Args:
        traced: The operations.
        slot_of: The place of each value in the table.
        rests: What rests.
        differentiable: Of operations that run again with gradients, what asks for them.
    """

    def __init__(
        self,
        traced: TracedModule,
        slot_of: Mapping[fx.Node, int],
        rests: Rests,
        differentiable: Mapping[int, Iterable[Differentiable]],
    ) -> None:
        self.traced, self.slot_of, self.rests, self.differentiable = traced, slot_of, rests, differentiable
        self._has_contexts = any(contexts_of(part) for operation in traced.operations for part in operation.parts)

    def of_forward(
        self,
        forward: Iterable[Instruction],
        plain: Collection[int],
        attended: Collection[int],
        drawing: Collection[int],
    ) -> tuple[Stretch | Instruction, ...]:
        """The instructions of a forward in which nothing is watched.

        A function is run outside the contexts of operations, which therefore are left for it: what autocast has cast
        once must not be cast anew because of a discard in between, which stays an instruction.

        Args:
            forward: The instructions, one by one.
            plain: The operations whose first runs are nothing but their calls.
            attended: Those of them of which the executor must know the beginning and the end.
            drawing: Those of which it must know that they draw random numbers.
        """
        found: list[Stretch | Instruction] = []
        for is_simple, group in groupby(forward, lambda i: _is_simple(i, Do.RUN, plain)):
            instructions = tuple(group)
            if is_simple and (not self._has_contexts or any(what is Do.RUN for what, _ in instructions)):
                found.append(self.compiled(instructions, is_first=True, attended=attended, drawing=drawing))
            else:
                found += instructions
        return tuple(found)

    def of_backward(
        self,
        before: Iterable[Instruction],
        plain: Collection[int],
        external: Callable[[int], Iterable[int]],
        seen: frozenset[int],
        hooked: frozenset[int],
        *,
        attended: frozenset[int] = frozenset(),
        drawing: frozenset[int] = frozenset(),
        recorded: frozenset[int] = frozenset(),
    ) -> tuple[Part, ...]:
        """The instructions before a backward.

        Args:
            before: The instructions, one by one.
            plain: The operations whose recomputations are nothing but their calls.
            external: The slots of what an operation reads from outside.
            seen: The slots of what lives where others may write.
            hooked: The operations of which autograd gets references.
            attended: Those that run again whose beginning and end the executor must know.
            drawing: Those of which it must know that they draw random numbers.
            recorded: Those that run again with gradients.
        """
        found: list[Part] = []
        for is_simple, group in groupby(before, lambda i: _is_simple(i, Do.RUN_AGAIN, plain)):
            instructions = tuple(group)
            again = [n for what, n in instructions if what is Do.RUN_AGAIN]
            if is_simple and again:
                made = {p for n in again for p in self._outputs(n)}
                read = {i for n in again for p in self.traced.operations[n].parts for i in p.all_input_nodes}
                reads = {self.slot_of[i] for i in read if i in self.traced.producer and i in self.slot_of}
                reads -= {self.slot_of[p] for p in made}
                watched = (attended | drawing).intersection(again)
                run = self.compiled(instructions, is_first=False, attended=attended, drawing=drawing, recorded=recorded)
                found.append(
                    Again(
                        run,
                        instructions,
                        tuple(reads),
                        tuple({slot for n in again for slot in external(n)}),
                        tuple(reads & seen),
                        watched,
                        hooked.intersection(again) - watched,
                    )
                )
            elif is_simple and all(what is not Do.FILL for what, _ in instructions):
                slots = (self.slot_of[p] for what, n in instructions if what is Do.DROP for p in self._outputs(n))
                found.append(LetGo(tuple(slots), tuple(n for what, n in instructions if what is Do.DROP_TAPE)))
            else:
                found += instructions
        return tuple(found)

    def _outputs(self, n: int) -> tuple[fx.Node, ...]:
        return self.traced.operations[n].outputs

    def compiled(
        self,
        instructions: Sequence[Instruction],
        *,
        is_first: bool,
        attended: Collection[int] = (),
        drawing: Collection[int] = (),
        recorded: Collection[int] = (),
    ) -> Stretch:
        """Instructions as one function; see `compile_stretch`. Of the operations some need not be among them."""
        items: list[Item] = []
        for what, n in instructions:
            if what is Do.COMPUTE:
                items.append(self.traced.constants[n])
            elif what is Do.DROP:
                items += [self.slot_of[p] for p in self._outputs(n)]
            elif what is Do.DROP_TAPE:
                items.append(TapeOf(n))
            elif what is Do.REST:
                (output,) = self._outputs(n)
                items.append(OnValue(self.slot_of[output], self.rests.tensors[n].resting, is_last=True))
            elif what is Do.REST_TAPE:
                (output,) = self._outputs(n)
                items.append(OnValue(self.slot_of[output], self.rests.tapes[n].resting))
            elif what is Do.FILL:
                (output,) = self._outputs(n)
                items += [OnValue(self.slot_of[output], tensor.filling) for tensor in self.rests.filled[n]]
            else:
                items.append(self.traced.operations[n])
        operations, tapes = self.traced.operations, self.rests.tapes
        run = {n for what, n in instructions if what in (Do.RUN, Do.RUN_AGAIN)}
        with_gradients = {
            operations[n].name: WithGradients(n, self.differentiable, tapes[n].filling if n in tapes else None)
            for n in run.intersection(recorded)
        }
        return compile_stretch(
            items,
            self.slot_of,
            is_first=is_first,
            attended={operations[n].name: n for n in run.intersection(attended)},
            drawing={operations[n].name: n for n in run.intersection(drawing)},
            with_gradients=with_gradients,
        )


_SIMPLE = frozenset({Do.COMPUTE, Do.DROP, Do.DROP_TAPE, Do.REST, Do.FILL, Do.REST_TAPE})


def _is_simple(instruction: Instruction, run: Do, plain: Collection[int]) -> bool:
    what, n = instruction
    return what in _SIMPLE or (what is run and n in plain)
