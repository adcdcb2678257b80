"""Nodes of a graph as lines of Python, of which functions are made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from .contexts import contexts_of
from .leaves import leaf_of


class Writer:
    """Writes nodes as lines of Python; whatever is no plain number gets a name.

    The outermost `depth` contexts of the nodes are entered already; in place of what is `scratch` stands new memory.
    """

    def __init__(self, slot_of: Mapping[fx.Node, int], depth: int = 0) -> None:
        self.slot_of, self.depth = slot_of, depth
        self.namespace: dict[str, Any] = {}
        self.locals: dict[fx.Node, str] = {}
        self.num_locals = 0
        self.scratch: frozenset[fx.Node] = frozenset()
        self.tabled: set[fx.Node] = set()  # of the local ones, what is in the table too

    def function(self, body: list[str], name: str) -> Callable[..., Any]:
        """The function of a table of values, of tapes and of an attendant that consists of these lines."""
        source = "\n".join(["def run(v, tapes=None, attendant=None):", *(f"    {line}" for line in body)])
        exec(compile(source, f"<{name}>", "exec"), self.namespace)
        return self.namespace["run"]

    def cutting(self, nodes: Collection[fx.Node]) -> list[str]:
        """The lines that cut local values from their graphs."""
        cut = self.constant(leaf_of) if nodes else ""
        return [f"{t} = {cut}({t})" for t in (self.locals[n] for n in nodes)]

    def value_in(self, slot: int) -> str:
        """The name of a value: a local one, or in the table."""
        local = self._local_in(slot)
        return f"v[{slot}]" if local is None else self.locals[local]

    def noting(self, slot: int) -> list[str]:
        """The line that tells the table of another local value, if it has the one before."""
        local = self._local_in(slot)
        return [f"v[{slot}] = {self.locals[local]}"] if local in self.tabled else []

    def _local_in(self, slot: int) -> fx.Node | None:
        return next((n for n in self.locals if self.slot_of.get(n) == slot), None)

    def forget(self, slot: int) -> str:
        """The line that lets go of a value."""
        local = self._local_in(slot)
        gone = [] if local is None else [f"del {self.locals.pop(local)}"]
        return "; ".join(gone if local is not None and local not in self.tabled else [*gone, f"v[{slot}] = None"])

    def lines(self, n: fx.Node) -> Iterable[str]:
        """The call, within its contexts."""
        args = [self.argument(a) for a in n.args]
        kwargs = [f"**{{{key!r}: {self.argument(a)}}}" for key, a in n.kwargs.items()]  # `from` is a name too
        if n.op == "call_method":
            call = f"{args[0]}.{n.target}({', '.join([*args[1:], *kwargs])})"
        else:
            call = f"{self.constant(n.target)}({', '.join([*args, *kwargs])})"
        name = self.locals[n] = f"t{self.num_locals}"
        self.num_locals += 1
        contexts = [f"{self.constant(c.enter)}()" for c in contexts_of(n)[self.depth :]]
        if contexts:
            yield f"with {', '.join(contexts)}: {name} = {call}"
        else:
            yield f"{name} = {call}"

    def name_of(self, n: fx.Node) -> str:
        """A node's value: of this function, or from outside."""
        if n in self.scratch:
            return f"{self.constant(torch.empty_like)}(v[{self.slot_of[n]}])"
        return self.locals.get(n) or f"v[{self.slot_of[n]}]"

    def argument(self, a: Any) -> str:
        """An argument, which may be nested."""
        if isinstance(a, fx.Node):
            return self.name_of(a)
        if type(a) in (tuple, torch.Size):
            return f"({''.join(f'{self.argument(b)}, ' for b in a)})"
        if type(a) in (list, immutable_list):
            return f"[{''.join(f'{self.argument(b)}, ' for b in a)}]"
        if type(a) in (dict, immutable_dict):
            return "{" + "".join(f"{self.constant(k)}: {self.argument(b)}, " for k, b in a.items()) + "}"
        if type(a) is slice:
            s = cast(Any, a)
            return f"slice({self.argument(s.start)}, {self.argument(s.stop)}, {self.argument(s.step)})"
        if a is None or type(a) in (bool, int):
            return repr(a)
        return self.constant(a)

    def constant(self, value: Any) -> str:
        """A name for a value that the source cannot spell."""
        name = f"c{len(self.namespace)}"
        self.namespace[name] = value
        return name
