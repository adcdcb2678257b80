"""The operations of a training step with their measured costs: what planners and the simulator read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import chain
from typing import Any, Final, Literal, cast, get_args

from .stored import reading

Unit = Literal["bytes", "seconds", "price"]

# What a field counts. Whatever holds of all bytes or of all seconds (that they are not negative, how they grow with the
# batch) asks `fields_in` instead of naming fields, so that a new field cannot be forgotten.
_BYTES: Final[Mapping[str, Unit]] = {"unit": "bytes"}
_SECONDS: Final[Mapping[str, Unit]] = {"unit": "seconds"}
_PRICE: Final[Mapping[str, Unit]] = {"unit": "price"}  # seconds of the host, whatever the batch


@cache
def fields_in(unit: Unit, of: type[Any]) -> tuple[str, ...]:
    """The names of the fields of a dataclass that count that unit."""
    return tuple(f.name for f in fields(of) if f.metadata.get("unit") == unit)


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of the forward pass, with what its backward keeps and what both cost.

    Indices are positions in `Graph.nodes`; bytes are bytes of storage, seconds are measured or estimated.

    Attributes:
        name: Unique name, for people.
        kind: The operation: `conv2d`, `batch_norm`, `relu`, `add`; a fused node joins its parts with `+`.
        inputs: The nodes whose output the operation reads.
        saved: The nodes, itself included, whose *output* its backward reads.
        held: Those of them that can give up their memory, and be given it again, without hooks: autograd holds the very
            tensors that operations returned. Of its own output it holds the storage; that must be small, and no other
            node a view of it.
        is_tape_held: Whether all of its tape can always be reached from autograd's graph, give up its memory like that,
            and be filled again in less time than hooks take.
        output_bytes: Bytes of the output's storage; 0 for a view.
        tape_bytes: Bytes saved only for its backward that are no node's output (batch-norm statistics, masks).
        forward_seconds: Time of one forward run.
        backward_seconds: Time of its backward.
        recording_seconds: What of `forward_seconds` autograd takes to record it, which a run again does without.
        rerun_price: Seconds that running it again costs beside those, whatever the sizes: the call, drawing, and an
            output that gives up its memory and gets it again.
        stretch_price: Seconds that a stretch of recomputations costs beside them that begins with it.
        tape_price: Seconds that running it again costs beside them where that brings its tape.
        hook_price: Seconds that it costs beside them where something that its backward reads is not there all the time
            from its first run on: hooks hand over what it saves.
        forward_workspace_bytes: Transient peak of the forward beyond inputs, outputs and tape.
        backward_workspace_bytes: Transient peak of the backward beyond its inputs and gradients.
        parameter_bytes: Bytes of the parameter gradients that appear with its backward.
        storage_of: The node whose storage the output views, or None.
        is_random: Whether a run consumes random numbers.
        mutates: Names of the buffers that a run writes.
        gradient_bytes: Bytes of the gradient of the output; 0 where none is needed. None stands for the output's
            bytes (for a view: those of the storage that it views).
        shares_gradient: The inputs that receive (a view of) the output's gradient itself, in no memory of their
            own, as both sides of an addition do. None stands for what is viewed, which is right for a reshape.
        num_outputs: Tensors in the output; a tuple's gradient is held element by element, not summed.
        num_saved: Tensors that autograd saves for its backward, wherever they belong.
        num_tape_storages: Storages that its tape is in.
        input_gradient_bytes: Bytes of gradients of the graph's inputs that appear with its backward, to stay.
        backward_release_bytes: By how much the peak of its backward is lower where its own output and tape are
            discarded right after it: several operations run as one let go of them on the way.
        backward_shared_bytes: By how much it is higher where something else holds the gradient of its output, which
            several operations run as one otherwise let go of on the way.
        backward_shared_release_bytes: What `backward_release_bytes` is where something else holds that gradient: the
            peak may be at another moment then.
    """

    name: str
    kind: str = ""
    inputs: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    output_bytes: int = field(default=0, metadata=_BYTES)
    tape_bytes: int = field(default=0, metadata=_BYTES)
    forward_seconds: float = field(default=0.0, metadata=_SECONDS)
    backward_seconds: float = field(default=0.0, metadata=_SECONDS)
    recording_seconds: float = field(default=0.0, metadata=_SECONDS)
    rerun_price: float = field(default=0.0, metadata=_PRICE)
    stretch_price: float = field(default=0.0, metadata=_PRICE)
    tape_price: float = field(default=0.0, metadata=_PRICE)
    hook_price: float = field(default=0.0, metadata=_PRICE)
    forward_workspace_bytes: int = field(default=0, metadata=_BYTES)
    backward_workspace_bytes: int = field(default=0, metadata=_BYTES)
    parameter_bytes: int = field(default=0, metadata=_BYTES)
    storage_of: int | None = None
    is_random: bool = False
    mutates: tuple[str, ...] = ()
    gradient_bytes: int | None = field(default=None, metadata=_BYTES)
    shares_gradient: tuple[int, ...] | None = None
    num_outputs: int = 1
    num_saved: int = 0
    num_tape_storages: int = 0
    input_gradient_bytes: int = field(default=0, metadata=_BYTES)
    backward_release_bytes: int = field(default=0, metadata=_BYTES)
    backward_shared_bytes: int = field(default=0, metadata=_BYTES)
    backward_shared_release_bytes: int = field(default=0, metadata=_BYTES)
    held: tuple[int, ...] = ()
    is_tape_held: bool = False

    @property
    def is_view(self) -> bool:
        """Whether the output lives in another node's storage."""
        return self.storage_of is not None

    @property
    def rerun_seconds(self) -> float:
        """Time of a run again, beside the prices of a stretch and of a tape."""
        return max(0.0, self.forward_seconds - self.recording_seconds) + self.rerun_price

    def backward_excess_bytes(self, *, is_released: bool, is_shared: bool) -> int:
        """By how much the peak of its backward differs from that of one with all to itself that holds all it reads.

        Args:
            is_released: Whether its own output and tape are discarded right after it.
            is_shared: Whether something else holds the gradient of its output.
        """
        if is_shared:
            return self.backward_shared_bytes - (self.backward_shared_release_bytes if is_released else 0)
        return -self.backward_release_bytes if is_released else 0


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Type and sizes of a tensor: what bytes and seconds hold for.

    >>> str(TensorKind("float32", (8, 3, 64, 64)))
    'float32 8×3×64×64'
    """

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {'×'.join(map(str, self.shape)) or 'scalar'}"


@dataclass(frozen=True, slots=True)
class Graph:
    """The nodes of a training step in topological order; checked on construction.

    Attributes:
        nodes: The operations; every input of a node stands before it.
        input_bytes: Bytes of the inputs, alive throughout.
        static_bytes: Bytes of parameters, buffers and optimizer state, alive throughout.
        outputs: The nodes whose output the caller holds until their own backward (the loss reads them).
        let_go: The nodes whose output the caller gets, of which no gradient comes: it lets go of them before the
            backward begins. Planners take them as any others, but where they are named among `outputs`, too
            (`holding_all`); `step_memory` counts them to the end of the forward.
        profiled_on: The inputs that all this was measured with, and holds for; empty where it is not known. Graphs
            that differ in nothing else are equal.
        users: For each node, the nodes that read its output (derived).
        roots: For each node, the node that owns the storage of its output: itself unless it is a view (derived).
        reads: For each node, the nodes whose output a run of it reads, the base of a view included (derived).

    Raises:
        ValueError: An index out of range or out of order, a negative cost, a view with bytes of its own.
    """

    nodes: tuple[Node, ...]
    input_bytes: int = field(default=0, metadata=_BYTES)
    static_bytes: int = field(default=0, metadata=_BYTES)
    outputs: tuple[int, ...] = ()
    let_go: tuple[int, ...] = field(default=(), kw_only=True)
    profiled_on: tuple[TensorKind, ...] = field(default=(), compare=False)
    users: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    roots: tuple[int, ...] = field(init=False, repr=False, compare=False)
    reads: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        for name in fields_in("bytes", Graph):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but memory is not negative")
        users: list[list[int]] = [[] for _ in self.nodes]
        roots: list[int] = []
        for index, node in enumerate(self.nodes):
            _check_node(node, index)
            for i in dict.fromkeys(node.inputs):
                users[i].append(index)
            roots.append(index if node.storage_of is None else roots[node.storage_of])
        object.__setattr__(self, "let_go", tuple(self.let_go))
        for label in ("outputs", "let_go"):
            for index in getattr(self, label):
                if not 0 <= index < len(self.nodes):
                    raise ValueError(f"{label} holds node {index}, but the graph has {len(self.nodes)} nodes")
        object.__setattr__(self, "users", tuple(tuple(u) for u in users))
        object.__setattr__(self, "roots", tuple(roots))
        object.__setattr__(self, "reads", tuple(_read_by(node) for node in self.nodes))
        object.__setattr__(self, "_hash", hash((self.nodes, self.input_bytes, self.static_bytes, self.outputs)))

    def __hash__(self) -> int:  # of hundreds of nodes: computed once
        return self._hash

    def ends(self) -> tuple[int, ...]:
        """The nodes whose gradients the loss makes, ascending: the outputs; where none is named, what has no user."""
        leaving = set(self.outputs).difference(self.let_go) or {n for n, users in enumerate(self.users) if not users}
        return tuple(n for n in sorted(leaving) if self.nodes[n].gradient_bytes != 0)

    def asked_for(self, sizes: Set[int] | None) -> Graph:
        """This graph as what is called where a step asks for gradients of these sizes alone.

        Args:
            sizes: Of the gradients that come in, in bytes; None where they may come of all outputs.
        """
        if sizes is None:
            return self
        nodes = self.nodes
        unasked = [n for n in self.outputs if nodes[n].num_outputs == 1 and self.gradient_bytes(n) not in {0, *sizes}]
        asked = tuple(n for n in self.outputs if n not in unasked)
        return replace(self, outputs=asked, let_go=tuple(unasked)) if asked else self

    def asked_as(self, known: Graph) -> Graph:
        """This graph as what is called in place of a known one, where it has as many outputs: each as the other's."""
        places = sorted({*known.outputs, *known.let_go})
        if len(places) != len(self.outputs):
            return self
        let_go = {own for own, place in zip(self.outputs, places, strict=True) if place in known.let_go}
        return replace(self, outputs=tuple(n for n in self.outputs if n not in let_go), let_go=tuple(sorted(let_go)))

    @property
    def holding_all(self) -> Graph:
        """This graph with what is let go of held as other outputs are, which planners know: no step needs more."""
        return replace(self, outputs=tuple(sorted({*self.outputs, *self.let_go})))

    def gradient_bytes(self, index: int) -> int:
        """Bytes of the gradient of the output of node `index`."""
        stated = self.nodes[index].gradient_bytes
        return self.nodes[self.roots[index]].output_bytes if stated is None else stated

    def shares_gradient(self, index: int) -> tuple[int, ...]:
        """The inputs of node `index` that receive its output's gradient in no memory of their own."""
        node = self.nodes[index]
        if node.shares_gradient is not None:
            return node.shares_gradient
        return () if node.storage_of is None else (node.storage_of,)

    def with_reruns_priced(self) -> Graph:
        """This graph with what a run again takes as the seconds of every run, for planners, which know no other.

        All schedules run every node once, so that they compare as they do with first runs as they are.
        """
        if not any(node.rerun_price or node.recording_seconds for node in self.nodes):
            return self
        free = {"rerun_price": 0.0, "recording_seconds": 0.0}
        nodes = (replace(n, forward_seconds=n.rerun_seconds, **free) for n in self.nodes)
        return replace(self, nodes=tuple(nodes))

    def with_prices_of_runs(self) -> Graph:
        """This graph with prices of single runs alone, for planners that know no others; itself where it has no others.

        A run again has that of the hooks of all that save its output, which is too much where they save others that
        are discarded, too, or where they need none (see `uses.resting`), and that of its tape.
        """
        if not any(node.stretch_price or node.tape_price or node.hook_price for node in self.nodes):
            return self
        prices = [node.rerun_price + node.tape_price for node in self.nodes]
        for node in self.nodes:
            for i in node.saved:
                prices[i] += 0.0 if i in node.held else node.hook_price
        nodes = (
            replace(node, rerun_price=price, stretch_price=0.0, tape_price=0.0, hook_price=0.0)
            for node, price in zip(self.nodes, prices, strict=True)
        )
        return replace(self, nodes=tuple(nodes))

    def with_seconds_of(self, other: Graph, factor: float = 1.0) -> Graph:
        """This graph with the seconds of `other`, a profile of the same module, scaled by `factor`.

        Bytes come exactly from fake tensors at any size, seconds from a small run on the device: `factor` is the
        ratio of the batch sizes.

        Raises:
            ValueError: The graphs do not have the same nodes.
        """
        if [n.name for n in self.nodes] != [n.name for n in other.nodes]:
            raise ValueError(f"graphs of {len(self.nodes)} and {len(other.nodes)} nodes do not describe one module")
        nodes = tuple(
            replace(
                a,
                **{seconds: getattr(b, seconds) * factor for seconds in fields_in("seconds", Node)},
                **{price: getattr(b, price) for price in fields_in("price", Node)},
            )
            for a, b in zip(self.nodes, other.nodes, strict=True)
        )
        return replace(self, nodes=nodes)

    def to_json(self) -> str:
        """The graph as JSON text, which `from_json` reads back to an equal graph."""
        names = "input_bytes", "static_bytes", "outputs", "let_go"
        data = {name: getattr(self, name) for name in names}
        inputs = [(kind.dtype, kind.shape) for kind in self.profiled_on]
        nodes = [{k: v for k, v in asdict(n).items() if v != _DEFAULTS.get(k)} for n in self.nodes]
        return json.dumps({**data, "profiled_on": inputs, "nodes": nodes})

    @classmethod
    def from_json(cls, text: str) -> Graph:
        """The graph that `to_json` wrote.

        Raises:
            ValueError: The text is not such a graph.
        """
        with reading("graph"):
            return cls._read(json.loads(text))

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> Graph:
        known = {f.name for f in fields(Node)}
        nodes: list[Node] = []
        for entry in data["nodes"]:
            if unknown := set(entry) - known:
                raise ValueError(f"node {entry.get('name')!r} has unknown fields {sorted(unknown)}")
            values: dict[str, Any] = {
                k: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for k, v in entry.items()
            }
            nodes.append(Node(**values))
        inputs = (TensorKind(dtype, tuple(shape)) for dtype, shape in data.get("profiled_on", ()))
        ends = {name: tuple(data.get(name, ())) for name in ("outputs", "let_go")}
        return cls(tuple(nodes), data["input_bytes"], data["static_bytes"], profiled_on=tuple(inputs), **ends)


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Node) if f.name != "name"}


def _read_by(node: Node) -> tuple[int, ...]:
    if node.storage_of is None or node.storage_of in node.inputs:
        return node.inputs
    return (*node.inputs, node.storage_of)


def _check_node(node: Node, index: int) -> None:
    """Raises ValueError where a node contradicts itself or its place."""
    where = f"node {index} ({node.name!r})"
    for label, indices, limit in (
        ("inputs", node.inputs, index),
        ("saved", node.saved, index + 1),
        ("held", node.held, index + 1),
        ("shares_gradient", node.shares_gradient or (), index),
        ("storage_of", () if node.storage_of is None else (node.storage_of,), index),
    ):
        for i in indices:
            if not 0 <= i < limit:
                raise ValueError(f"{where}: {label} names node {i}, which does not stand before it")
    for label in chain.from_iterable(fields_in(unit, Node) for unit in get_args(Unit)):
        cost = getattr(node, label)
        if cost is not None and not cost >= 0:
            raise ValueError(f"{where}: {label} is {cost}, but a cost is not negative")
    if node.is_view and node.output_bytes:
        raise ValueError(f"{where}: views node {node.storage_of}, yet has {node.output_bytes} bytes of its own")
