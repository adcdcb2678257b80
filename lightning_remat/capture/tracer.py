"""A module and example inputs become a traced module: operations in the order in which they run."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, fx, nn

from ..errors import TraceError
from ..measure.meter import tensor_storage
from ..module_state.ambient import casts_apart
from ..module_state.nesting import Structure, flatten, tensors_in
from ..operations.fingerprint import Fingerprint
from .capture import Capture, capture
from .constants import TensorConstant
from .decisions import Decision, call_key
from .fusion import group
from .out_of_place import put_out_of_place
from .recording import Record, record
from .returned_inputs import read_where_made


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
        mutates: Names of the buffers that it writes.
        is_random: Whether it draws random numbers.
        is_permuted: Whether a tensor that it makes has its dimensions in another order in memory.
        leaves_out: The parts whose value is taken without the inputs that it holds, which are read where they are made.
    """

    name: str
    kind: str
    parts: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    inputs: tuple[int, ...]
    view_of: int | None
    mutates: tuple[str, ...]
    is_random: bool
    is_permuted: bool
    leaves_out: frozenset[fx.Node]


@dataclass(frozen=True, slots=True, eq=False)
class TracedModule:
    """A module captured as operations.

    Attributes:
        module: What was traced.
        fx_graph: The captured graph.
        operations: In an order in which they can run.
        constants: The fx nodes without tensors in their values (shapes, numbers), in order.
        outputs: Indices of the operations whose values the module returns.
        producer: The operation that makes each fx node's value.
        call_spec: Structure of the call's arguments.
        output_spec: Structure of what the call returns.
        decisions: What the module's Python decided by the sizes of the call.
        call_leaves: The call's flattened arguments: None for a tensor, else the constant that was traced in.
        call_key: What else of the call's arguments decisions may have depended on.
        fingerprint: What the module's Python was like.
        reasons: For each submodule that is one operation because it cannot be traced: which, why, and where.
    """

    module: nn.Module
    fx_graph: fx.Graph
    operations: tuple[Operation, ...]
    constants: tuple[fx.Node, ...]
    outputs: tuple[int, ...]
    producer: dict[fx.Node, int]
    call_spec: Structure
    output_spec: Structure
    decisions: tuple[Decision, ...]
    call_leaves: tuple[Any, ...]
    call_key: Hashable
    fingerprint: Fingerprint
    reasons: tuple[str, ...] = ()

    @property
    def rung(self) -> Literal["traced", "leaves"]:
        """How the module was captured: all of it in single operations, or with submodules that are run as a whole."""
        return "leaves" if self.reasons else "traced"


@casts_apart()
def trace(module: nn.Module, *args: Any, **kwargs: Any) -> TracedModule:
    """The module's call on these arguments as operations, ready for `profile` and for the executor.

    torch.nn modules are single operations; an in-place operation is fused with the producer of the storage that it
    overwrites; a view is an operation of its own; a submodule that cannot be traced is one opaque operation.

    Args:
        module: Left as it was, on error too.
        *args: Example inputs, real or fake tensors, possibly nested in tuples, lists and dicts.
        **kwargs: Example keyword inputs.

    Returns:
        The operations, whose shapes follow the inputs of each later call.

    Raises:
        TraceError: The module cannot be captured; names the line and the remedy.
    """
    captured = capture(module, args, kwargs)
    records = record(module, captured.graph, tensors_in((args, kwargs)))
    return _traced(module, captured, records, args, kwargs)


@casts_apart()
def trace_out_of_place(module: nn.Module, *args: Any, **kwargs: Any) -> TracedModule | None:
    """What `trace` returns, in-place activations as out-of-place operations of their own; None if there are none.

    The results are the same in every bit. The plain step takes more memory, by a copy of each activation's input; the
    lowest peak may be lower, as that input need not stay while the gradient passes the activation.
    """
    captured = capture(module, args, kwargs)
    tensors = tensors_in((args, kwargs))
    if not put_out_of_place(module, captured.graph, record(module, captured.graph, tensors)):
        return None
    return _traced(module, captured, record(module, captured.graph, tensors), args, kwargs)


def _traced(
    module: nn.Module,
    captured: Capture,
    records: dict[fx.Node, Record],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> TracedModule:
    graph = captured.graph
    leaves, spec = flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    _refuse_foreign_writes(module, graph, records)
    unread = read_where_made(module, graph, records, captured.decisions)
    groups = group(graph, records)
    producer = {n: i for i, g in enumerate(groups) for n in g}
    names: set[str] = set()
    operations = tuple(_operation(module, g, k, producer, records, names, unread) for k, g in enumerate(groups))
    constants = _constants(graph, producer, captured.decisions)
    returned = next(n for n in graph.nodes if n.op == "output").all_input_nodes
    return TracedModule(
        module,
        graph,
        operations,
        constants,
        tuple(sorted({producer[n] for n in returned if n in producer})),
        producer,
        spec,
        captured.output_structure,
        captured.decisions,
        tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves),
        call_key(tensors),
        Fingerprint.of(module, graph),
        captured.reasons,
    )


def _constants(graph: fx.Graph, producer: dict[fx.Node, int], decisions: tuple[Decision, ...]) -> tuple[fx.Node, ...]:
    """The nodes without tensors that a run needs: all but those that were only asked about while tracing."""
    asked = {node for node, _, _ in decisions}
    dropped: set[fx.Node] = set()
    for n in reversed(graph.nodes):
        if n.op.startswith("call") and n not in producer and (n.users or n in asked) and dropped.issuperset(n.users):
            dropped.add(n)
    return tuple(n for n in graph.nodes if n.op.startswith("call") and n not in producer and n not in dropped)


def _refuse_foreign_writes(module: nn.Module, graph: fx.Graph, records: dict[fx.Node, Record]) -> None:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for n in graph.nodes:
        for owner in records[n].writes:
            if owner.op == "placeholder":
                raise TraceError(
                    f"{type(module).__name__}: {n.name} writes in place into an input, so a recomputation would see "
                    f"other values ({_line_of(n)}). Remedy: use the out-of-place form of this operation",
                    where=_line_of(n),
                )
            if isinstance(owner.target, TensorConstant) and not _is_copied(graph, owner.target):
                raise TraceError(
                    f"{type(module).__name__}: {n.name} writes in place into a tensor that is no buffer and that no "
                    f"call makes anew ({_line_of(n)}). Remedy: keep it in a buffer (register_buffer(..., "
                    "persistent=False)), or make it from an input (new_zeros, zeros_like)",
                    where=_line_of(n),
                )
            if owner.op == "get_attr" and owner.target in parameters:
                raise TraceError(
                    f"{type(module).__name__}: {n.name} writes in place into the parameter {owner.target} "
                    f"({_line_of(n)}). Remedy: update parameters outside the forward",
                    where=_line_of(n),
                )


def _is_copied(graph: fx.Graph, constant: TensorConstant) -> bool:
    """Lets every call have its own copy of a constant that it writes, where the forward makes it and has one name."""
    storage = tensor_storage(constant.tensor)
    constants = [n.target for n in graph.nodes if isinstance(n.target, TensorConstant)]
    is_alone = all(c is constant or tensor_storage(c.tensor) is not storage for c in constants)
    constant.is_copied = constant.is_made and is_alone
    return constant.is_copied


def _line_of(n: fx.Node) -> str:
    lines = (n.stack_trace or "").strip().splitlines()
    return lines[-2].strip() if len(lines) > 1 else n.format_node() or n.name


def _operation(
    module: nn.Module,
    parts: list[fx.Node],
    index: int,
    producer: dict[fx.Node, int],
    records: dict[fx.Node, Record],
    names: set[str],
    unread: set[fx.Node],
) -> Operation:
    members = set(parts)
    outputs = tuple(n for n in parts if records[n].has_tensors and any(u not in members for u in n.users))
    inputs = sorted({producer[i] for n in parts for i in n.all_input_nodes if i in producer} - {index})
    owners = {producer[o] for n in outputs for o in records[n].views if o in producer} - {index}
    is_view = not any(records[n].owns for n in parts) and len(owners) == 1
    # The nearest input in the same storage, so that a view of a view names what it is made from.
    base = max((i for i in inputs if i in owners or _views(parts, i, producer, records, owners)), default=None)
    name = unique = _name(parts[0])
    count = 1
    while unique in names:
        unique, count = f"{name}_{count}", count + 1
    names.add(unique)
    return Operation(
        name=unique,
        kind="+".join(dict.fromkeys(_kind(module, n) for n in parts)),
        parts=tuple(parts),
        outputs=outputs,
        inputs=tuple(inputs),
        view_of=base if is_view else None,
        mutates=tuple(dict.fromkeys(name for n in parts for name in records[n].buffers)),
        is_random=any(records[n].is_random for n in parts),
        is_permuted=any(records[n].is_permuted for n in parts),
        leaves_out=frozenset(unread.intersection(parts)),
    )


def _views(
    parts: list[fx.Node], i: int, producer: dict[fx.Node, int], records: dict[fx.Node, Record], owners: set[int]
) -> bool:
    """Whether operation i, read by the parts, is itself a view into a storage of `owners`."""
    return any(
        producer.get(n) == i and any(producer.get(o) in owners for o in records[n].views)
        for part in parts
        for n in part.all_input_nodes
    )


def _name(n: fx.Node) -> str:
    """The module's path; for a function, its name below the module that calls it."""
    if n.op == "call_module":
        return str(n.target)
    stack = list(n.meta.get("nn_module_stack", {}))
    return f"{stack[-1]}.{n.name}" if stack and stack[-1] else n.name


def _kind(module: nn.Module, n: fx.Node) -> str:
    """The operation in snake case: `BatchNorm2d` and `F.batch_norm` are both `batch_norm`."""
    if n.op == "call_module":
        name = type(module.get_submodule(str(n.target))).__name__
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()
    else:
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))
    name = name.rstrip("_").removeprefix("_")
    if "norm" in name:
        name = name.rstrip("0123456789d")
    return {"iadd": "add", "imul": "mul", "isub": "sub", "truediv": "div", "itruediv": "div"}.get(name, name)
