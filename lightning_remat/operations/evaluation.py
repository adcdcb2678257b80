"""Runs one operation of a traced module: resolves its arguments, calls its parts, returns what others read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves, tree_map_only

from ..capture.tracer import Operation
from ..module_state.hooks import has_hooks, noted_hooks, silenced_hooks, with_submodules
from .contexts import CustomFunction, entered, has_contexts

Fetch = Callable[[fx.Node], Any]


def evaluate(module: nn.Module, operation: Operation, fetch: Fetch, *, is_first: bool) -> list[Any]:
    """The values of the operation's outputs.

    Args:
        module: The traced module, which owns submodules, parameters and buffers.
        operation: What to run.
        fetch: Value of an fx node outside the operation.
        is_first: A first run calls submodules with their hooks; a recomputation must not fire them again.
    """
    values: dict[fx.Node, Any] = {}

    def resolve(n: fx.Node) -> Any:
        return values[n] if n in values else fetch(n)

    for part in operation.parts:
        values[part] = call(module, part, resolve, is_first=is_first)
        if part in operation.leaves_out:
            values[part] = _without(values[part], [resolve(i) for i in part.all_input_nodes if i.op != "get_attr"])
    return [values[n] for n in operation.outputs]


def _without(value: Any, inputs: list[Any]) -> Any:
    """The value with None in place of the inputs that it holds."""
    given = {id(leaf) for leaf in tree_leaves(inputs)}
    return tree_map_only(Tensor, lambda t: None if id(t) in given else t, value)


def call(module: nn.Module, n: fx.Node, fetch: Fetch, *, is_first: bool) -> Any:
    """The value of one fx node, its arguments fetched, in the contexts in which it was recorded."""
    if has_contexts(n):
        with entered(n):
            return _call(module, n, fetch, is_first=is_first)
    return _call(module, n, fetch, is_first=is_first)


def _call(module: nn.Module, n: fx.Node, fetch: Fetch, *, is_first: bool) -> Any:
    def resolve(i: fx.Node) -> Any:
        return attribute(module, str(i.target)) if i.op == "get_attr" else fetch(i)

    args: Any = _resolved(n.args, resolve)
    kwargs: Any = map_aggregate(n.kwargs, lambda a: resolve(a) if isinstance(a, fx.Node) else a) if n.kwargs else {}
    target: Any = n.target
    if n.op == "call_function":
        return target(*args, **kwargs)
    if n.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    assert n.op == "call_module", n.op
    submodule = submodule_at(module, target)
    with noted_hooks(submodule) if is_first else silenced_hooks(submodule):
        return submodule(*args, **kwargs)


def foreign_modules(module: nn.Module, operation: Operation) -> list[nn.Module]:
    """The submodules that the operation runs as a whole and in which users' code runs: it may change anything."""
    called = [submodule_at(module, str(p.target)) for p in operation.parts if p.op == "call_module"]
    return [m for m in called if any(_is_users(inner) for inner in with_submodules(m))]


def _is_users(module: nn.Module) -> bool:
    return has_hooks(module) or not type(module).__module__.startswith("torch.nn.")


def is_foreign(operation: Operation) -> bool:
    """Whether the operation runs a custom `torch.autograd.Function`."""
    return any(isinstance(part.target, CustomFunction) for part in operation.parts)


def _resolved(args: tuple[Any, ...], resolve: Fetch) -> list[Any]:
    result: list[Any] = []
    for a in args:
        if isinstance(a, fx.Node):
            result.append(resolve(a))
        elif isinstance(a, (tuple, list, dict, slice)):
            result.append(map_aggregate(a, lambda b: resolve(b) if isinstance(b, fx.Node) else b))  # pyright: ignore
        else:
            result.append(a)
    return result


def submodule_at(module: nn.Module, path: str) -> nn.Module:
    """What `get_submodule` finds, faster: every operation of every step asks several times."""
    for name in path.split(".") if path else ():
        found = module._modules[name]  # pyright: ignore[reportPrivateUsage]
        assert found is not None, path
        module = found
    return module


def attribute(module: nn.Module, path: str) -> Any:
    """The attribute at a dotted path."""
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def detached(value: Any) -> Any:
    """The same value with every tensor cut from its autograd graph."""
    if isinstance(value, Tensor):
        return value.detach()
    return tree_map_only(Tensor, lambda t: t.detach(), value)
