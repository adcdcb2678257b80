"""What an operation is, and a captured call of a module as operations in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx, nn


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One node-to-be of a `Graph`: fx nodes that run together.

    Attributes:
        name: Unique name.
        kind: The operation, its parts joined with `+`.
        parts: Its fx nodes, in order.
        outputs: The parts whose value others read.
        inputs: Indices of the operations whose values it reads.
        view_of: Index of the operation whose storage its output lives in, or None.
        lives_in: The fx nodes that own the storages in which its outputs live, its own parts left out.
        writes: The placeholders (buffers) that it writes, effects left out: a recomputation writes into copies.
        effects: The parts that only write into what lives outside (`num_batches_tracked += 1`), or in which processes
            share something: they happen once.
        is_random: Whether it draws random numbers.
        is_permuted: Whether a tensor that it makes has its dimensions in another order in memory.
        is_dead_end: Whether gradients could flow to it and none will: nothing that reads it leads to an output. What it
            makes is cut from autograd's graph, which would hold what it saved.
    """

    name: str
    kind: str
    parts: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    inputs: tuple[int, ...]
    view_of: int | None
    lives_in: frozenset[fx.Node]
    writes: tuple[fx.Node, ...]
    effects: frozenset[fx.Node]
    is_random: bool
    is_permuted: bool
    is_dead_end: bool

    @property
    def external(self) -> tuple[fx.Node, ...]:
        """The placeholders that it reads: parameters, buffers, inputs of the call."""
        found = (i for part in self.parts for i in part.all_input_nodes if i.op == "placeholder")
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True, eq=False)
class TracedModule:
    """A module's call captured as operations.

    Attributes:
        module: What was traced.
        fx_graph: The captured graph; parameters, buffers and numbers that may change are placeholders, as inputs are.
        root: Holds what the graph fetches by `get_attr`: constants, bodies of functions.
        operations: In an order in which they can run.
        constants: The fx nodes without tensors in their values (shapes, numbers), in order.
        outputs: Indices of the operations whose values the module returns.
        producer: The operation that makes each fx node's value.
        owned: The placeholders whose values the module holds, not the call, and the names under which it does.
        written: The placeholders that operations or effects write, each with the last node that does.
        forward: The compiled forward that handed over the graph; binds further calls, and runs them.
        captured: What it handed over.
        reasons: What of the call runs otherwise than operation by operation, and why.
        extents: Of the values with which it was called, as `extents_of` tells them.
    """

    module: nn.Module
    fx_graph: fx.Graph
    root: fx.GraphModule
    operations: tuple[Operation, ...]
    constants: tuple[fx.Node, ...]
    outputs: tuple[int, ...]
    producer: Mapping[fx.Node, int]
    owned: Mapping[fx.Node, str]
    written: Mapping[fx.Node, fx.Node]
    forward: Any
    captured: object
    reasons: tuple[str, ...] = ()
    extents: tuple[int, ...] = ()

    @property
    def rung(self) -> Literal["traced"]:
        """How the module was captured: as a whole."""
        return "traced"

    @property
    def placeholders(self) -> tuple[fx.Node, ...]:
        """The nodes that stand for the values of a call, in order."""
        return tuple(n for n in self.fx_graph.nodes if n.op == "placeholder")

    @property
    def output_node(self) -> fx.Node:
        """The node that names what the call returns."""
        return next(n for n in reversed(self.fx_graph.nodes) if n.op == "output")

    @property
    def dead_ends(self) -> frozenset[int]:
        """The operations whose backward never comes."""
        return frozenset(n for n, operation in enumerate(self.operations) if operation.is_dead_end)

    def fetched(self) -> dict[fx.Node, Any]:
        """The values of the nodes that fetch something from `root`."""
        found: dict[fx.Node, Any] = {}
        for n in self.fx_graph.nodes:
            if n.op == "get_attr":
                value: Any = self.root
                for name in str(n.target).split("."):
                    value = getattr(value, name)
                found[n] = value
        return found
