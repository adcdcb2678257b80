"""A chain sequence as arrays, for the compiled functions."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ...chain import ChainSequence, Operation, OperationKind
from ...schedules.compiled import Small

KINDS = ("Fall", "Fck", "Fn", "B")
FALL, FCK, FN, BACK = range(4)


class Steps(NamedTuple):
    """The operations of a sequence in a few bytes each: index in `KINDS`, and stage from 1."""

    kinds: NDArray[np.int8]
    stages: Small


def to_steps(sequence: ChainSequence) -> Steps:
    """The steps of the sequence."""
    kinds = [KINDS.index(kind) for kind, _ in sequence]
    return Steps(np.array(kinds, np.int8), np.array([stage for _, stage in sequence], np.int32))


def to_sequence(steps: Steps) -> ChainSequence:
    """The sequence of the steps."""
    pairs = zip(steps.kinds.tolist(), steps.stages.tolist(), strict=True)
    return ChainSequence(tuple(Operation(cast(OperationKind, KINDS[kind]), stage) for kind, stage in pairs))
