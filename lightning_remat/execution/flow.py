"""Which backwards have run when another one runs, whatever part of a graph autograd is asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

Node = Any
"""Of autograd's graph, for whose many kinds there is no one type."""


class Flow:
    """How gradients flow between operations, as autograd recorded it in a forward.

    Autograd runs a backward if it is reached from what it is asked for, and leads to what is wanted. So the backward
    of `a` has run before that of `b` if it leads there and all that reaches `b` from outside reaches `a`. Gradients
    come from what is returned; where a backward was differentiated itself, also from what it saved, once it has run.

    Args:
        made: The nodes of the tensors that each operation made, in the order in which they ran.
        given: The nodes that were there before.
        returned: The nodes of what leaves the graph.
        savers: Of each operation, whose backwards may hold what it made.
    """

    def __init__(
        self,
        made: Mapping[int, Collection[Node]],
        given: Iterable[Node],
        returned: Iterable[Node],
        savers: Mapping[int, Collection[int]],
    ) -> None:
        self._ends: dict[int, list[Node]] = {}  # of an operation, the nodes through which gradients come
        self._own: dict[int, list[Node]] = {}
        self._savers = savers
        home: dict[Node, int] = dict.fromkeys(given, -1)
        for n, ends in made.items():
            self._own[n] = reached(ends, home, n)
            self._ends[n] = [node for node in ends if home.get(node) == n]
        self._number = {node: k for k, node in enumerate(node for ends in self._ends.values() for node in ends)}
        self._above: dict[Node, int] = {}  # bit k: the end with that number leads to it, or is it
        self._from: dict[Node, int] = {}  # bit k: what was saved of operation k, or is returned, leads to it
        first = max(self._own, default=-1) + 1
        self._returned = ~((1 << first) - 1)
        nodes = [node for own in self._own.values() for node in own]
        for k, node in enumerate(returned, first):
            self._from[node] = self._from.get(node, 0) | 1 << k
            nodes += reached([node], home, -1)  # that of what an operation only writes
        for n, own in self._own.items():
            for node in own if savers.get(n) else ():
                self._from[node] = self._from.get(node, 0) | 1 << n
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
        """The operations before whose backwards that of `a` has begun: the most of which that holds together.

        What was saved of an operation brings gradients only after a backward that had saved it.
        """
        ends = [(self._number[node], self._from.get(node, 0)) for node in self._ends[a]]
        bad: dict[int, list[list[int]]] = {}  # of each node that an end leads to, what reaches it and not that end
        for n, own in self._own.items():
            found = [[self._from.get(x, 0) & ~s for k, s in ends if self._above[x] >> k & 1] for x in own]
            if all(any(not other & self._returned for other in others) for others in found):
                bad[n] = found
        after = set(bad)
        while True:
            safe = sum(1 << n for n, savers in self._savers.items() if after.issuperset(savers))
            left = {n for n in after if all(any(not other & ~safe for other in others) for others in bad[n])}
            if left == after:
                return after
            after = left


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
