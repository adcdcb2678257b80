"""A module and example inputs become a traced module: operations in the order in which they run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ..errors import TraceError, check_kind
from ..measure.meter import tensor_storage
from ..module_state.ambient import casts_apart
from ..module_state.batches import tensors_held
from ..module_state.nesting import extents_of
from ..operations.contexts import lift_contexts
from ..operations.functions import differentiates_in_its_backward, replace_functions, returns_nothing
from ..operations.operation import Operation, TracedModule
from ..operations.synchronized import shares_statistics
from .aliasing import Record, record
from .capture_error import CaptureError, where_of
from .dynamo import CapturedGraph, CompiledForward
from .forwards import forward_of
from .fusion import group, read_again
from .out_of_place import put_out_of_place
from .unseen_writes import set_apart


def trace(module: nn.Module, *args: Any, **kwargs: Any) -> TracedModule:
    """The module's call on these arguments as operations, ready for `profile` and for the executor.

    TorchDynamo captures the call; nothing of it is run. An in-place operation is fused with the producer of the storage
    that it overwrites; a view is an operation of its own.

    Args:
        module: Left as it was, on error too.
        *args: Example inputs, real or fake tensors, possibly nested in tuples, lists, dicts and dataclasses.
        **kwargs: Example keyword inputs.

    Returns:
        The operations, whose shapes follow the inputs of each later call.

    Raises:
        TraceError: The call is no single graph; names the line and the remedy.
        TypeError: It is no module.
    """
    check_kind(module, nn.Module, "the first argument of trace, before the module's own inputs")
    return capture_call(module, args, kwargs)[0]


def ways_of(traced: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[TracedModule]:
    """The ways in which a call's operations may run: as traced, then out of place where that is another one."""
    yield traced
    if (apart := out_of_place(traced, args, kwargs)) is not None:
        yield apart


def out_of_place(traced: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedModule | None:
    """A traced call with in-place activations as out-of-place operations of their own; None if there are none.

    The results are the same in every bit. The plain step takes more memory, by a copy of each activation's input; the
    lowest peak may be lower, as that input need not stay while the gradient passes the activation.
    """
    captured, values = _bound(traced.forward, traced.module, args, kwargs)
    given = tensors_held((args, kwargs))
    return traced_graph(traced.module, traced.forward, captured, values, given, is_out_of_place=True)


def capture_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TracedModule, list[Any]]:
    """What `trace` returns, and the values of its placeholders in this call."""
    forward = forward_of(module)
    captured, values = _bound(forward, module, args, kwargs)
    return next(_ways_of_graph(module, forward, captured, values, tensors_held((args, kwargs)))), values


def recapture(traced: TracedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TracedModule, list[Any]]:
    """The operations of another call, the same unless its guards ask for another graph, and its values.

    Raises:
        TraceError: The call is no single graph.
    """
    captured, values = _bound(traced.forward, traced.module, args, kwargs)
    if captured is traced.captured:
        return traced, values
    ways = _ways_of_graph(traced.module, traced.forward, captured, values, tensors_held((args, kwargs)))
    other = next(ways)
    if not is_alike(traced, other):
        other = next((way for way in ways if is_alike(traced, way)), other)
    return other, values


def _ways_of_graph(
    module: nn.Module, forward: CompiledForward, captured: CapturedGraph, values: list[Any], given: list[Tensor]
) -> Iterator[TracedModule]:
    for is_out_of_place in (False, True):
        traced = traced_graph(module, forward, captured, values, given, is_out_of_place=is_out_of_place)
        if traced is not None:
            yield traced


def is_alike(a: TracedModule, b: TracedModule) -> bool:
    """Whether both have the same operations, between which the same values pass: their plans are exchangeable."""
    return [_shape_of(o) for o in a.operations] == [_shape_of(o) for o in b.operations] and a.outputs == b.outputs


def _shape_of(o: Operation) -> tuple[Any, ...]:
    return o.name, o.kind, o.inputs, o.view_of, o.is_random, len(o.outputs)


def _bound(
    forward: CompiledForward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[CapturedGraph, list[Any]]:
    try:
        return forward.bind(module, args, kwargs)
    except CaptureError as error:
        raise not_one_graph(module, error) from error


def not_one_graph(module: nn.Module, error: CaptureError) -> TraceError:
    """The error of a forward that TorchDynamo did not capture."""
    return TraceError(
        f"{type(module).__name__}.forward cannot be captured as one graph: {error}"
        f"{f' ({error.where})' if error.where else ''}. Remedy: {error.remedy}",
        where=error.where,
    )


@casts_apart()
def traced_graph(
    module: nn.Module,
    forward: CompiledForward,
    captured: CapturedGraph,
    values: list[Any],
    given: list[Tensor],
    *,
    is_out_of_place: bool = False,
) -> TracedModule | None:
    """A captured graph as operations; None if it is wanted out of place and has nothing in place.

    Args:
        module: Whose call was captured.
        forward: What handed over the graph.
        captured: Its graph, which stays as it is.
        values: Of the graph's placeholders.
        given: The tensors among the call's arguments; all others are the module's.
        is_out_of_place: Whether in-place activations become operations of their own.

    Raises:
        TraceError: The graph does what cannot be recomputed.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(captured.graph, {}))
    root = fx.GraphModule(captured.module, graph)
    graph = root.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    owned = _owned(module, placeholders, values, given)
    if (reason := lift_contexts(graph, is_grad_enabled=True)) is not None:
        raise TraceError(f"{type(module).__name__}: {reason}")
    set_apart(graph)
    reasons = replace_functions(root, owned)
    if differentiates_in_its_backward(root):
        raise TraceError(
            "it calls torch.utils.checkpoint with use_reentrant=True, which differentiates in its backward"
        )
    if (asking := next((n for n in graph.nodes if n.target is torch.autograd.grad), None)) is not None:
        raise TraceError(  # captured with `torch._dynamo.config.trace_autograd_ops`
            f"{type(module).__name__} calls torch.autograd.grad within its forward, where nothing can be recomputed "
            f"({_line_of(asking)}). Remedy: leave torch._dynamo.config.trace_autograd_ops off",
            where=_line_of(asking),
        )
    records = record(root, values)
    if is_out_of_place:
        if not put_out_of_place(graph, records):
            return None
        records = record(root, values)
    _check_writes(module, graph, records, owned)
    _read_written_as_they_are(graph, records)
    effects = _effects(graph, records)
    groups = group(graph, records, effects)
    effects -= read_again(groups, effects, records)
    producer = {n: i for i, g in enumerate(groups) for n in g if n not in effects}
    names: set[str] = set()
    returned = next(n for n in graph.nodes if n.op == "output").all_input_nodes
    dead_ends = _dead_ends(groups, producer, records, returned)
    operations = tuple(
        _operation(g, k, producer, records, names, effects, is_dead_end=k in dead_ends) for k, g in enumerate(groups)
    )
    return TracedModule(
        module,
        graph,
        root,
        operations,
        _constants(graph, producer, effects),
        tuple(sorted({producer[n] for n in returned if n in producer})),
        producer,
        owned,
        {o: n for n in graph.nodes for o in records[n].writes if o.op == "placeholder"},
        forward,
        captured,
        tuple(reasons),
        extents_of(values),
    )


def _owned(
    module: nn.Module, placeholders: list[fx.Node], values: list[Any], given: list[Tensor]
) -> Mapping[fx.Node, str]:
    """The placeholders whose tensors are not among the call's arguments, and the names of these tensors."""
    names = {id(t): name for name, t in (*module.named_buffers(), *module.named_parameters())}
    held = {id(s) for t in given if (s := tensor_storage(t)) is not None}
    found: dict[fx.Node, str] = {}
    for n, value in zip(placeholders, values, strict=True):
        if not isinstance(value, Tensor):
            continue
        if id(value) in names:
            found[n] = names[id(value)]
        elif id(tensor_storage(value)) not in held:
            found[n] = n.name
    return found


def _effects(graph: fx.Graph, records: dict[fx.Node, Record]) -> frozenset[fx.Node]:
    """The nodes that act on what lives outside and make nothing else, with those that only serve them."""
    found: set[fx.Node] = set()
    for n in reversed(graph.nodes):
        if not n.op.startswith("call") or records[n].needs_grad or records[n].grafts:
            continue
        writes = records[n].writes
        is_effect = bool(writes) and all(o.op == "placeholder" for o in writes) and not records[n].owns
        is_effect |= (returns_nothing(n) and not writes) or shares_statistics(n)
        serves = bool(n.users) and found.issuperset(n.users) and records[n].has_tensors and not writes
        if is_effect or serves:
            found.add(n)
    return frozenset(found)


def _dead_ends(
    groups: list[list[fx.Node]],
    producer: Mapping[fx.Node, int],
    records: dict[fx.Node, Record],
    returned: Collection[fx.Node],
) -> set[int]:
    """The operations with gradients that flow to nothing: what reads them leads to no output and to no buffer."""
    leading: set[int] = set()
    found: set[int] = set()
    for k in reversed(range(len(groups))):
        own = [n for n in groups[k] if n in producer]
        if not any(records[n].needs_grad or records[n].differentiates for n in own):  # `y[0] = x` has no value
            continue
        readers = {producer[u] for n in own for u in n.users if u in producer}
        is_kept = any(n in returned or any(o.op == "placeholder" for o in records[n].writes) for n in own)
        (leading if is_kept or not leading.isdisjoint(readers) else found).add(k)
    return found


def _constants(graph: fx.Graph, producer: Mapping[fx.Node, int], effects: frozenset[fx.Node]) -> tuple[fx.Node, ...]:
    """The nodes without tensors that a run needs."""
    needed: list[fx.Node] = []
    dropped: set[fx.Node] = set()
    for n in reversed(graph.nodes):
        if n.op.startswith("call") and n not in producer and n not in effects:
            if dropped.issuperset(n.users):
                dropped.add(n)
            else:
                needed.append(n)
    return tuple(reversed(needed))


def _check_writes(
    module: nn.Module, graph: fx.Graph, records: dict[fx.Node, Record], owned: Mapping[fx.Node, str]
) -> None:
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for n in graph.nodes:
        for owner in records[n].writes.intersection(placeholders):
            what = f"the parameter {owned[owner]}" if owner in owned else "an input"
            if owner in records[n].grafts and (owner not in owned or records[owner].needs_grad):
                raise TraceError(
                    f"{type(module).__name__}: {n.name} writes in place into {what}, with gradients "
                    f"({_line_of(n)}). Remedy: write under torch.no_grad(), or use the out-of-place form",
                    where=_line_of(n),
                )
            if owner not in owned and any(owner in records[other].views for other in placeholders):
                raise TraceError(
                    f"{type(module).__name__}: {n.name} writes in place into an input that shares its memory with "
                    f"another, so a recomputation would see other values ({_line_of(n)}). Remedy: use the out-of-place "
                    "form of this operation",
                    where=_line_of(n),
                )


def _read_written_as_they_are(graph: fx.Graph, records: dict[fx.Node, Record]) -> None:
    """What hands on a tensor that is written (the write, a cast that changes nothing) is read by none but the caller.

    All others read the tensor itself, as it is then.
    """
    written = {o for entry in records.values() for o in entry.writes if o.op == "placeholder"}
    for n in list(graph.nodes):
        origin = records[n].passes_on
        if origin in written:
            n.replace_all_uses_with(origin, delete_user_cb=_is_within)
            if not n.users and not records[n].writes:
                graph.erase_node(n)
                del records[n]


def _is_within(user: fx.Node) -> bool:
    return user.op != "output"


def _line_of(n: fx.Node) -> str:
    return where_of(n) or n.format_node() or n.name


def _operation(
    parts: list[fx.Node],
    index: int,
    producer: Mapping[fx.Node, int],
    records: dict[fx.Node, Record],
    names: set[str],
    effects: frozenset[fx.Node],
    *,
    is_dead_end: bool,
) -> Operation:
    members = set(parts)
    own = [n for n in parts if n not in effects]
    named = [n for n in own if records[n].has_tensors or records[n].writes] or own or parts  # shapes compute nothing
    outputs = tuple(n for n in own if records[n].has_tensors and any(u not in members for u in n.users))
    read = {i for n in parts for i in n.all_input_nodes if i in producer}
    inputs = sorted({producer[i] for i in read} - {index})
    owners = {producer[o] for n in outputs for o in records[n].views if o in producer} - {index}
    is_view = not any(records[n].owns for n in own) and len(owners) == 1
    # The nearest input in the same storage, so that a view of a view names what it is made from.
    viewing = {producer[i] for i in read if owners.intersection(producer.get(o, -1) for o in records[i].views)}
    base = max(owners.intersection(inputs) | viewing - {index}, default=None)
    name = unique = _name(named[0])
    count = 1
    while unique in names:
        unique, count = f"{name}_{count}", count + 1
    names.add(unique)
    return Operation(
        name=unique,
        kind="+".join(dict.fromkeys(_kind(n) for n in named)),
        parts=tuple(parts),
        outputs=outputs,
        inputs=tuple(inputs),
        view_of=base if is_view else None,
        lives_in=frozenset(o for n in outputs for o in records[n].views) - members,
        writes=tuple(
            sorted({o for n in own for o in records[n].writes if o.op == "placeholder"}, key=lambda o: o.name)
        ),
        effects=effects.intersection(parts),
        is_random=any(records[n].is_random for n in parts),
        is_permuted=any(records[n].is_permuted for n in own),
        is_dead_end=is_dead_end,
    )


def _name(n: fx.Node) -> str:
    """The path of the module that calls the operation; below one of the user's, followed by the operation."""
    stack = list(cast(dict[str, tuple[str, type | str]], n.meta.get("nn_module_stack", {})).values())
    if not stack:
        return _kind(n)
    path, kind = stack[-1]
    path = re.sub(r"^L\['\w+'\]\.?", "", path).replace("[", ".").replace("]", "")
    path = re.sub(r"\.?(_modules|__self__|__dict__)|[()]|'", "", path).replace("..", ".").strip(".")
    where = kind if isinstance(kind, str) else kind.__module__  # of what `torch.export` made it is a name
    is_layer = where.startswith("torch.nn.modules")
    return path if path and is_layer else ".".join(filter(None, [path, _kind(n)]))


def _kind(n: fx.Node) -> str:
    """The operation's name: `F.batch_norm` is `batch_norm`, `+=` is `add`."""
    name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))
    name = name.partition(".")[0]  # of an operator, without its overload
    name = name.rstrip("_").removeprefix("_")
    if "norm" in name:
        name = name.rstrip("0123456789d")
    return {"iadd": "add", "imul": "mul", "isub": "sub", "truediv": "div", "itruediv": "div"}.get(name, name)
