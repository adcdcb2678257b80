"""Which operation's backward makes the gradient of a parameter or input that several operations read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ..schedules.graph import Node


@dataclass(slots=True)
class GradientOwners:
    """Counts each gradient of a parameter or input where the step makes it first.

    That is the last operation with a gradient for it, whose backward comes first. What an earlier one makes is added
    to it. Only the backwards tell which operations have one: the size of a parameter that `reshape_as` reads gives it
    none.

    Attributes:
        last_reader: id of a parameter or input → the last operation that reads it.
    """

    last_reader: dict[int, int]
    _owner: dict[int, int] = field(default_factory=dict[int, int])  # of those so far
    _added: dict[int, list[tuple[Tensor, int]]] = field(default_factory=dict[int, list[tuple[Tensor, int]]])
    _when_added: dict[int, tuple[frozenset[int], dict[str, int]]] = field(
        default_factory=dict[int, tuple[frozenset[int], dict[str, int]]]
    )

    @classmethod
    def of(cls, readings: Iterable[Iterable[Tensor]]) -> GradientOwners:
        """Of operations that read these parameters and inputs."""
        return cls({id(t): n for n, tensors in enumerate(readings) for t in tensors})

    def added_to(self, n: int, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The parameters among them whose gradients may exist when the backward of operation n makes them.

        They are leaves: what is made for them is added, and gone, as soon as it is made.
        """
        return [t for t in tensors if isinstance(t, nn.Parameter) and t.is_leaf and self.last_reader[id(t)] > n]

    def note(self, n: int, tensor: Tensor, num_bytes: int) -> None:
        """The backward of operation n, after those of all before it, makes a gradient of that many bytes."""
        if (earlier := self._owner.get(id(tensor))) is not None:
            self._added.setdefault(earlier, []).append((tensor, num_bytes))
        self._owner[id(tensor)] = n

    def note_costs(self, n: int, tensors: Iterable[Tensor], costs: dict[str, int]) -> None:
        """What the backward of operation n costs if the gradients of these tensors are there already."""
        self._when_added[n] = frozenset(map(id, tensors)), costs

    def settled(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """The nodes, each gradient counted once; where it is added, it is workspace of the operation that made it."""
        result = list(nodes)
        for n, added in self._added.items():
            measured, costs = self._when_added.get(n, (frozenset[int](), dict[str, Any]()))
            node = result[n]
            for tensor, num_bytes in added:
                kind = "parameter_bytes" if isinstance(tensor, nn.Parameter) else "input_gradient_bytes"
                part = min(num_bytes, getattr(node, kind))
                rest: dict[str, Any] = {kind: getattr(node, kind) - part}
                node = replace(node, **rest, backward_workspace_bytes=node.backward_workspace_bytes + part)
            result[n] = replace(node, **costs) if measured == frozenset(id(t) for t, _ in added) else node
        return tuple(result)
