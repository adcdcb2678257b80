"""Contexts that a forward enters (`no_grad`, autocast, ...): calls in the captured graph, settings of nodes between."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.nn import attention
from torch.nn.attention import sdpa_kernel

_KEY = "contexts"
_set_grad_enabled = cast(Any, torch)._C._set_grad_enabled
_enter_inference_mode = cast(Any, torch.autograd.grad_mode)._enter_inference_mode
_amp = cast(Any, torch.amp.autocast_mode)
_set_kernels, _kernel = cast(Any, attention)._sdpa_kernel, cast(Any, attention)._backend_from_string


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """One entry into a context; equal only to itself, as autocast's casts live as long as the entry does."""

    kind: str
    args: tuple[Any, ...]

    def enter(self) -> AbstractContextManager[Any]:
        """A context manager of its own."""
        if self.kind == "autocast":
            device_type, dtype, is_enabled, is_cache_enabled = self.args
            return torch.autocast(device_type, dtype, is_enabled, is_cache_enabled)
        if self.kind == "attention":
            return cast(AbstractContextManager[Any], sdpa_kernel(*self.args))
        return torch.set_grad_enabled(self.args[0])


def contexts_of(node: fx.Node) -> tuple[Context, ...]:
    """The contexts in which the node was recorded, the outermost first."""
    return node.meta.get(_KEY, ())


def common_contexts(nodes: Iterable[fx.Node]) -> tuple[Context, ...]:
    """The outermost contexts in which all of the nodes were recorded."""
    found: tuple[Context, ...] | None = None
    for n in nodes:
        own = contexts_of(n)
        depth = 0
        while found is not None and depth < min(len(found), len(own)) and found[depth] is own[depth]:
            depth += 1
        found = own if found is None else found[:depth]
    return found or ()


@contextmanager
def entered(node: fx.Node) -> Generator[None]:
    """The contexts in which the node was recorded."""
    with ContextStack() as stack:
        stack.enter(contexts_of(node))
        yield


def lift_contexts(graph: fx.Graph, *, is_grad_enabled: bool) -> str | None:
    """Takes the calls that enter and leave contexts out of the graph and notes them on the nodes between.

    Args:
        graph: As captured, changed here.
        is_grad_enabled: The mode of gradients in which it begins.

    Returns:
        Why that is not possible, or None.
    """
    autocasts: dict[fx.Node, Context] = {}
    mode: Context | None = None
    kernels: Context | None = None
    num_kernel_calls = sum(n.target is _set_kernels for n in graph.nodes)  # the last puts back what was there
    for n in list(graph.nodes):
        if n.target is _set_grad_enabled:
            wanted = bool(n.args[0])
            mode = None if wanted == is_grad_enabled else Context("grad mode", (wanted,))
        elif n.target is _amp._enter_autocast:
            device_type, dtype, is_enabled, is_cache_enabled = n.args
            if is_cache_enabled is None:
                is_cache_enabled = torch.is_autocast_cache_enabled()
            autocasts[n] = Context("autocast", (device_type, dtype, is_enabled, is_cache_enabled))
            continue
        elif n.target is _set_kernels:
            num_kernel_calls -= 1
            backends, sets_priority = n.args
            wanted = [_kernel(*b.args) if isinstance(b, fx.Node) else b for b in backends]
            kernels = Context("attention", (wanted, sets_priority)) if num_kernel_calls else None
        elif n.target is _enter_inference_mode:
            return "it enters inference mode, whose tensors no backward may read"
        elif n.target is _amp._exit_autocast:
            del autocasts[cast(fx.Node, n.args[0])]
        else:
            found = (*autocasts.values(), *(c for c in (mode, kernels) if c is not None))
            if found and n.op.startswith("call"):
                n.meta[_KEY] = found
            continue
        graph.erase_node(n)
    if mode is not None or autocasts:
        return "it leaves the mode of gradients or of autocast other than it found it"
    for n in reversed(list(graph.nodes)):
        if n.target is _amp._enter_autocast or n.target is _kernel:
            graph.erase_node(n)
    return None


class ContextStack:
    """The contexts in which operations were recorded, each entered once for all that lie in it, as in the forward."""

    def __init__(self) -> None:
        self._entered: list[tuple[Context, AbstractContextManager[Any]]] = []

    def __enter__(self) -> ContextStack:
        return self

    def enter(self, wanted: tuple[Context, ...]) -> None:
        """Leaves what is not wanted any more, and enters what is."""
        if not wanted and not self._entered:
            return
        common = 0
        while common < min(len(wanted), len(self._entered)) and wanted[common] is self._entered[common][0]:
            common += 1
        self._leave(common)
        for context in wanted[common:]:
            manager = context.enter()
            manager.__enter__()
            self._entered.append((context, manager))

    def _leave(self, depth: int) -> None:
        while len(self._entered) > depth:
            self._entered.pop()[1].__exit__(None, None, None)

    def __exit__(self, *error: object) -> None:
        self._leave(0)
