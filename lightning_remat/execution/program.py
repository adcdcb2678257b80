"""What the executor follows: what happens in the forward and before each backward, as straight lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..operations.contexts import Context
from ..operations.evaluation import Run, Stretch
from ..operations.leaves import Differentiable
from ..operations.operation import Operation, TracedModule
from ..schedules.graph import Graph
from ..schedules.schedule import Schedule
from .instructions import Instruction
from .places import Places
from .resting import Rests
from .stretches import Part


@dataclass(frozen=True, slots=True)
class Kinds:
    """Of what kind the values are with which a program runs: the same at each call, as TorchDynamo guards.

    Attributes:
        devices: Those of the tensors, the host left out.
        types: All of their types of device, as autocast knows them.
        is_fake: Whether tensors have no values.
    """

    devices: tuple[torch.device, ...]
    types: tuple[str, ...]
    is_fake: bool

    @classmethod
    def of(cls, values: Iterable[Any]) -> Kinds:
        """Those of the placeholders' values."""
        tensors = [v for v in values if isinstance(v, Tensor)]
        found = dict.fromkeys(t.device for t in tensors)
        devices = tuple(d for d in found if d.type not in ("cpu", "meta"))
        types = tuple(sorted({"cpu", *(d.type for d in devices)}))
        return cls(devices, types, any(isinstance(t, FakeTensor) for t in tensors))


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One operation as the executor sees it; values have the numbers of `slots`.

    Attributes:
        operation: Its description.
        run: The first run.
        run_again: A recomputation.
        outputs: Where its outputs go.
        effects: Where those of its effects go that others read.
        inputs: What it reads that operations make.
        producers: Which operations make these.
        external: What it reads from outside and a recomputation must find unchanged.
        kept: What it reads outside and the graph writes afterwards, or a buffer that it has written before: a
            recomputation reads copies made at the first run.
        is_hooked: Whether something that its backward reads is discarded before: autograd then gets references.
        is_announced: Whether its backward must tell that it begins, though it may ask for nothing.
        is_output: Whether the caller gets what it makes.
        is_repeated: Whether the schedule runs it more than once.
        is_taped: Whether its tape is discarded before its backward: else the references hold that.
        keeps_tape: Whether it is not discarded at once.
        contexts: Those in which all of it was recorded.
        is_plain: Whether a first run is nothing but the call, within its beginning and end where the executor must know
            of these: where it is hooked, announced, or draws random numbers.
        is_plain_again: Whether a recomputation is, as long as what it reads from outside has not changed.
        is_recorded_again: Whether a recomputation runs with gradients: for its tape, or lest other bits come out.
        is_conditional: Whether a recomputation must look at what it reads from outside.
        may_keep: Whether its backward may read inputs that it did not save.
    """

    operation: Operation
    run: Run
    run_again: Run
    outputs: tuple[int, ...]
    effects: tuple[int, ...]
    inputs: tuple[int, ...]
    producers: tuple[int, ...]
    external: tuple[int, ...]
    kept: tuple[int, ...]
    is_hooked: bool
    is_announced: bool
    is_output: bool
    is_repeated: bool
    is_taped: bool
    keeps_tape: bool
    contexts: tuple[Context, ...]
    is_plain: bool
    is_plain_again: bool
    is_recorded_again: bool
    is_conditional: bool
    may_keep: bool


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What the executor follows; holds no module's tensors, so that copies of a module share it.

    Attributes:
        traced: The operations.
        schedule: The actions.
        graph: The profile of the operations.
        steps: One for each operation.
        made: The places of all outputs.
        left: The operations whose outputs the forward leaves in the table.
        seen: Those of outputs that live where others may write: what the caller gets or gave, and views of it.
        num_slots: How many places the table has: those of the placeholders come first, those of what rests last.
        fetched: Values that the graph holds itself: slot and value.
        constants: How each is computed, and its slot.
        forward: What the forward does.
        stretches: The same where nobody watches single operations: those that follow one another are one function.
        backwards: The operations in the order of their backwards.
        before: For each entry of `backwards`, what happens when it tells that it begins, back to the one that told
            before; nothing for those that do not tell.
        busy: The places in `backwards` before which something happens, and the number of backwards.
        recomputes: For each entry of `backwards`, whether more happens then than that the table lets go of something.
        place: For each operation, its place in `backwards`.
        released: For each operation, whose outputs the table lets go of once its backward has read them.
        hooked: The operations of which autograd gets references.
        revived: The operations that run again before the first backward.
        settled: The places of what lies outside and is written before operations read it that may run again.
        result: What the caller gets: slots in place of fx nodes.
        rests: What gives up its memory in place.
        variants: The program in which nothing rests, and once it has run the one by which further calls run.
        copied: Operations, and what they read outside, of which a recomputation was seen to need the former value.
        suspected: The same of what others may have changed by then, until a recomputation has looked.
        learned: For each hooked operation, where its saved tensors were found to belong.
        differentiable: Of operations that run again with gradients, what they read to which these were found to flow.
        kinds: Of the values of its placeholders, once it has run.
        finished: What becomes of the program in which something rests before it runs.
    """

    traced: TracedModule
    schedule: Schedule
    graph: Graph
    steps: tuple[Step, ...]
    made: tuple[int, ...]
    left: tuple[int, ...]
    seen: tuple[int, ...]
    num_slots: int
    fetched: tuple[tuple[int, Any], ...]
    constants: tuple[tuple[Run, int], ...]
    forward: tuple[Instruction, ...]
    stretches: tuple[Stretch | Instruction, ...]
    backwards: tuple[int, ...]
    before: tuple[tuple[Part, ...], ...]
    busy: tuple[int, ...]
    recomputes: tuple[bool, ...]
    place: tuple[int, ...]
    released: tuple[frozenset[int], ...]
    hooked: frozenset[int]
    revived: frozenset[int]
    settled: tuple[int, ...]
    result: Any
    rests: Rests
    variants: list[Program]
    copied: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    suspected: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    learned: dict[int, Places] = field(default_factory=dict[int, Places])
    differentiable: dict[int, tuple[Differentiable, ...]] = field(default_factory=dict[int, tuple[Differentiable, ...]])
    kinds: list[Kinds] = field(default_factory=list[Kinds])
    finished: Callable[[Program], Program] = lambda program: program

    def use_hooks(self) -> None:
        """Lets nothing rest in further calls."""
        del self.variants[1:]
        self.variants.extend(self.variants[:1])


@dataclass(frozen=True, slots=True)
class SlotOf:
    """Stands for a value in what the caller gets."""

    slot: int
