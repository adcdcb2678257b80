"""Chains of stages and the sequences that train them: the abstract problem of beaumont2024.

Paper symbols: stage l turns a^(l-1) into a^l (`output_bytes`, w_a); its tape abar^l (`saved_bytes`, w_abar) holds all
that its backward reads besides a^(l-1), a^l included; delta^l is the gradient of a^l and as large. u_f, u_b are
seconds, o_f, o_b workspaces. A chain of L layers has L+1 stages: the last is the loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import fsum, lcm
from numbers import Integral
from typing import Literal, NamedTuple, cast

from .errors import ScheduleError
from .schedules.schedule import mark, parsed

OperationKind = Literal["Fall", "Fck", "Fn", "B"]


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage of a chain weighs and costs: (w_a, w_abar, u_f, u_b, o_f, o_b).

    Sizes may be in any one unit, whole or not; the loss stage of the paper's example is `Stage(0, 0, 0, 0)`.

    Attributes:
        output_bytes: The activation a^l, and its gradient.
        saved_bytes: The tape abar^l, the output included.
        forward_seconds: One forward run.
        backward_seconds: The backward.
        forward_workspace_bytes: Peak of the forward beyond what it reads and leaves.
        backward_workspace_bytes: Peak of the backward beyond what it reads and leaves.
    """

    output_bytes: float
    saved_bytes: float
    forward_seconds: float
    backward_seconds: float
    forward_workspace_bytes: float = 0
    backward_workspace_bytes: float = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} of a stage is {value}, but a cost is finite and not negative")


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages one after the other; the last is the loss.

    Attributes:
        input_bytes: The input a^0.
        stages: Stage l at index l-1.

    Raises:
        ValueError: No stage, or a negative size.
    """

    input_bytes: float
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages:
            raise ValueError("a chain needs at least one stage: its last is the loss")
        if not 0 <= self.input_bytes < float("inf"):
            raise ValueError(f"input_bytes is {self.input_bytes}, but a size is finite and not negative")


class Operation(NamedTuple):
    """One operation of Table 1.

    Attributes:
        kind: `Fall` runs a stage and keeps its tape, `Fck` runs it and keeps its input, `Fn` (the paper's F with an
            empty set) runs it and keeps neither, `B` is its backward.
        stage: Number of the stage, from 1.
    """

    kind: OperationKind
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}"


_OPERATION = re.compile(r"(Fall|Fck|Fn|B)([1-9]\d*)")


@dataclass(frozen=True, slots=True)
class ChainSequence:
    """Operations of a chain in the order in which they run.

    >>> sequence = ChainSequence.parse("Fck1 Fall2 B2 Fall1 B1")
    >>> sequence.operations[1]
    Operation(kind='Fall', stage=2)
    >>> print(sequence)
    Fck1 Fall2 B2 Fall1 B1
    """

    operations: tuple[Operation, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "operations", tuple(self.operations))

    def __str__(self) -> str:
        return " ".join(map(str, self.operations))

    def __len__(self) -> int:
        return len(self.operations)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    @classmethod
    def parse(cls, text: str) -> ChainSequence:
        """The sequence that `text` spells, as `str(sequence)` prints it.

        Raises:
            ScheduleError: A word is not an operation; the message marks it.
        """
        words = parsed(text, _OPERATION, "an operation: expected Fall, Fck, Fn or B and a stage's number from 1")
        return cls(tuple(Operation(cast(OperationKind, kind), stage) for kind, stage in words))


class Replay(NamedTuple):
    """What a valid sequence costs.

    Attributes:
        makespan: Seconds of all operations (Definition 3.2).
        peak: The most memory that any operation uses, in the chain's unit (Definitions 3.3 and 3.4).
    """

    makespan: float
    peak: float


def replay(chain: Chain, sequence: ChainSequence | str) -> Replay:
    """Makespan and peak of `sequence` on `chain`, by Table 1 and Definitions 3.1-3.4.

    An operation that memory allows in both forms of Table 1 takes a^(l-1) rather than abar^(l-1): it frees the more.
    Sizes that are not whole are read as the decimals that they print as, and added without rounding.

    Args:
        chain: The chain.
        sequence: Operations, or their text.

    Returns:
        The makespan in seconds, and the peak in the chain's unit (an int where all sizes are whole).

    Raises:
        ScheduleError: An operation whose input is not in memory, or no delta^0 at the end; the message marks it.

    Reference:
        Beaumont et al. 2024, Table 1, Definitions 3.1-3.4.

    >>> chain = Chain(10, (Stage(10, 20, 1.0, 2.0), Stage(0, 0, 0.5, 0.5)))
    >>> replay(chain, "Fall1 Fall2 B2 B1")
    Replay(makespan=4.0, peak=50)
    """
    if isinstance(sequence, str):
        sequence = ChainSequence.parse(sequence)
    sizes = WholeSizes.of(chain)
    usages = _usages(chain, sequence, sizes)
    ran = ((chain.stages[stage - 1], kind) for kind, stage in sequence)
    makespan = fsum(stage.backward_seconds if kind == "B" else stage.forward_seconds for stage, kind in ran)
    return Replay(makespan, sizes.to_unit(max(usages)))


def memory_usages(chain: Chain, sequence: ChainSequence) -> list[float]:
    """The memory that each operation of `sequence` uses, in the chain's unit (Definition 3.3).

    Raises:
        ScheduleError: As `replay`.
    """
    sizes = WholeSizes.of(chain)
    return [sizes.to_unit(usage) for usage in _usages(chain, sequence, sizes)]


def _usages(chain: Chain, sequence: ChainSequence, sizes: WholeSizes) -> list[int]:
    num_stages = len(chain.stages)
    outputs, tapes, gradient = {0}, set[int](), num_stages
    stored = sizes.output[0] + sizes.output[num_stages]
    usages: list[int] = []
    for position, (kind, stage) in enumerate(sequence):
        if stage > num_stages:
            raise _invalid(sequence, position, f"the chain has {num_stages} stages")
        if stage - 1 not in outputs and (kind == "Fn" or stage - 1 not in tapes):
            held = f" (abar^{stage - 1} is, but Fn takes a^{stage - 1})" if stage - 1 in tapes else ""
            raise _invalid(sequence, position, f"its input a^{stage - 1} is not in memory{held}")
        freed = sizes.output[stage - 1] if kind in ("B", "Fn") and stage - 1 in outputs else 0
        if kind == "B":
            if gradient != stage:
                raise _invalid(sequence, position, f"delta^{stage} is not in memory: delta^{gradient} is")
            if stage not in tapes:
                raise _invalid(sequence, position, f"abar^{stage} is not in memory: run Fall{stage} first")
            added = sizes.output[stage - 1]
            freed += sizes.output[stage] + sizes.tape[stage]
            gradient = stage - 1
            tapes.remove(stage)
            usages.append(stored + added + sizes.backward_workspace[stage])
        else:
            target, size = (tapes, sizes.tape) if kind == "Fall" else (outputs, sizes.output)
            added = 0 if stage in target else size[stage]
            target.add(stage)
            usages.append(stored + added + sizes.forward_workspace[stage])
        if kind in ("B", "Fn"):
            outputs.discard(stage - 1)
        stored += added - freed
    if gradient:
        raise _invalid(sequence, len(sequence), f"the sequence ends before B{gradient}: delta^0 is not computed")
    return usages


def _invalid(sequence: ChainSequence, position: int, reason: str) -> ScheduleError:
    word = f"{sequence.operations[position]}: " if position < len(sequence) else ""
    return ScheduleError(f"{mark(sequence, position)}\n{word}{reason}", position=position)


@dataclass(frozen=True, slots=True)
class WholeSizes:
    """The sizes of a chain as whole numbers of its finest decimal, so that sums of them are exact.

    Each list is indexed by stage from 1; only `output` has an entry 0, the chain's input.
    """

    output: list[int]
    tape: list[int]
    forward_workspace: list[int]
    backward_workspace: list[int]
    scale: int

    @classmethod
    def of(cls, chain: Chain) -> WholeSizes:
        """The sizes of `chain`; scale 1 where they are whole already."""
        stages = chain.stages
        columns = (
            [chain.input_bytes, *(s.output_bytes for s in stages)],
            [0, *(s.saved_bytes for s in stages)],
            [0, *(s.forward_workspace_bytes for s in stages)],
            [0, *(s.backward_workspace_bytes for s in stages)],
        )
        exact = [[_decimal(x) for x in column] for column in columns]
        scale = lcm(*(x.denominator for column in exact for x in column))
        whole = [[int(x * scale) for x in column] for column in exact]
        return cls(whole[0], whole[1], whole[2], whole[3], scale)

    def to_unit(self, amount: int) -> float:
        """`amount` in the chain's own unit: an int where that is whole numbers."""
        return amount if self.scale == 1 else amount / self.scale

    def from_unit(self, amount: float) -> int:
        """The whole number of the finest decimal within `amount`, a size in the chain's own unit."""
        return int(_decimal(amount) * self.scale // 1)


def _decimal(size: float) -> Fraction:
    """The decimal that `size` prints as, not the binary fraction beside it: 86.75 - 0.01 is 86.74."""
    return Fraction(int(size)) if isinstance(size, Integral) else Fraction(Decimal(repr(float(size))))
