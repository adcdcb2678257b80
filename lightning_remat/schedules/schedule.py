"""The language every planner speaks: four actions, a schedule of them, its text form and parser."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from ..errors import ScheduleError

ActionKind = Literal["F", "B", "D", "T"]


class Action(NamedTuple):
    """One step of a schedule.

    Attributes:
        kind: `F` runs the node (output and tape become resident), `B` its backward, `D` discards the output,
            `T` discards the tape.
        node: Index of the node.
    """

    kind: ActionKind
    node: int

    def __str__(self) -> str:
        return f"{self.kind}{self.node}"


_ACTION = re.compile(r"([FBDT])(\d+)")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A sequence of actions; a second `F` of a node is its recomputation.

    >>> schedule = Schedule.parse("F0 F1 D0 B1 F0 B0 D0 D1")
    >>> schedule.actions[2]
    Action(kind='D', node=0)
    >>> str(schedule)
    'F0 F1 D0 B1 F0 B0 D0 D1'
    """

    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(self.actions))

    def __str__(self) -> str:
        return " ".join(map(str, self.actions))

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions)

    def runs(self) -> Counter[int]:
        """How often each node runs, its first run included."""
        return Counter(node for kind, node in self.actions if kind == "F")

    @property
    def recomputes(self) -> bool:
        """Whether a node runs more than once."""
        return any(count > 1 for count in self.runs().values())

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule that `text` spells, as `str(schedule)` prints it.

        Raises:
            ScheduleError: A word is not an action; the message marks it.
        """
        words = parsed(text, _ACTION, "an action: expected F, B, D or T and a node's index")
        return cls(tuple(Action(cast(ActionKind, kind), node) for kind, node in words))


def parsed(text: str, word: re.Pattern[str], expected: str) -> list[tuple[str, int]]:
    """The kind and the number that each word of a text spells; `word` has a group for either.

    Raises:
        ScheduleError: A word is not as expected; the message marks it.
    """
    words = text.split()
    found: list[tuple[str, int]] = []
    for position, each in enumerate(words):
        match = word.fullmatch(each)
        if match is None:
            raise ScheduleError(f"{mark(words, position)}\n{each!r} is not {expected}", position=position)
        found.append((match[1], int(match[2])))
    return found


def mark(words: Iterable[object], position: int, *, around: int = 8) -> str:
    """Two lines: the words about `position`, and a caret under the one that stands there."""
    words = [str(w) for w in words]
    start, stop = max(0, position - around), min(len(words), position + around + 1)
    before = " ".join(["…"] * (start > 0) + words[start:position])
    line = " ".join(["…"] * (start > 0) + words[start:stop] + ["…"] * (stop < len(words)))
    column = len(before) + bool(before)
    return f"{line}\n{' ' * column}{'^' * len(words[position]) if position < len(words) else '^'}"
