"""Which backwards have run when another one runs, whatever part of a graph autograd is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

import torch

Node = Any
"""Of autograd's graph, for whose many kinds there is no one type."""


class Flow:
    """How gradients flow between operations, as autograd recorded it in a forward.

    Autograd runs a backward if it is reached from what it is asked for, and leads to what is wanted. So the backward
    of `a` has run before that of `b` if it leads there and all that reaches `b` from outside reaches `a`. Gradients
    come from what is returned; of a backward that is differentiated itself, after which they come also from what it
    saved, nothing is said.

    Args:
        made: The nodes of the tensors that each operation made, in the order in which they ran.
        given: The nodes that were there before.
        returned: The nodes of what leaves the graph.
    """

    def __init__(
        self,
        made: Mapping[int, Collection[Node]],
        given: Iterable[Node],
        returned: Iterable[Node],
    ) -> None:
        self._ends: dict[int, list[Node]] = {}  # of an operation, the nodes through which gradients come
        self._own: dict[int, list[Node]] = {}
        home: dict[Node, int] = dict.fromkeys(given, -1)
        for n, ends in made.items():
            self._own[n] = reached(ends, home, n)
            self._ends[n] = [node for node in ends if home.get(node) == n]
        self._number = {node: k for k, node in enumerate(node for ends in self._ends.values() for node in ends)}
        self._above: dict[Node, int] = {}  # bit k: the end with that number leads to it, or is it
        self._from: dict[Node, int] = {}  # bit k: what is returned as the k-th leads to it
        nodes = [node for own in self._own.values() for node in own]
        for k, node in enumerate(returned):
            self._from[node] = self._from.get(node, 0) | 1 << k
            nodes += reached([node], home, -1)  # that of what an operation only writes
        # What reads a value is made after it.
        for node in sorted(nodes, key=age, reverse=True):
            above = self._above.get(node, 0) | (1 << self._number[node] if node in self._number else 0)
            self._above[node] = above
            for following, _ in node.next_functions:
                if following in home:
                    self._above[following] = self._above.get(following, 0) | above
                    self._from[following] = self._from.get(following, 0) | self._from.get(node, 0)
        self._after: dict[int, set[int]] = {}

    def is_one_node(self, n: int) -> bool:
        """Whether the backward of an operation is a single one of autograd's, which reads all that it saved."""
        is_one = len(self._ends[n]) == len(self._own[n]) == 1
        return is_one and not isinstance(self._own[n][0], torch.autograd.function.BackwardCFunction)

    def is_told(self, n: int) -> bool:
        """Whether hooks can tell that the backward of an operation begins."""
        return bool(self._ends[n])

    def has_run_before(self, a: int, b: int) -> bool:
        """Whether the backward of `a` has begun whenever any of that of `b` runs."""
        if a not in self._after:
            self._after[a] = self._all_after(a)
        return b in self._after[a]

    def _all_after(self, a: int) -> set[int]:
        """The operations before whose backwards that of `a` has begun: one of its ends leads to each of their nodes."""
        ends = [(self._number[node], self._from.get(node, 0)) for node in self._ends[a]]
        return {
            n
            for n, own in self._own.items()
            if all(any(self._above[x] >> k & 1 and not self._from.get(x, 0) & ~s for k, s in ends) for x in own)
        }


def reached(nodes: Iterable[Node], home: dict[Node, int], n: int) -> list[Node]:
    """The nodes from these on that are at home nowhere yet, which operation `n` has made; leaves are left out."""
    found: list[Node] = []
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in home and node.next_functions:
            home[node] = n
            found.append(node)
            stack += [following for following, _ in node.next_functions if following is not None]
    return found


def age(node: Node) -> int:
    """A number that no other node of the same forward has; larger than those of the nodes that it leads to."""
    return node._sequence_nr()


def next_age() -> int:
    """That of the node that this thread makes next."""
    return cast("Callable[[], int]", torch.autograd._get_sequence_nr)()  # pyright: ignore
