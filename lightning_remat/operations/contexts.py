"""Contexts that a forward enters (`no_grad`, autocast), and functions with a backward of their own, as traces see them.

A symbolic trace records calls. What surrounds a call, and what a `torch.autograd.Function` says about gradients, would
be lost on it and the gradients be wrong. So every recorded call carries its contexts, a custom function is one call,
and what can neither be carried nor recorded stops the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.fx.proxy import Proxy
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from ..module_state.ambient import Ambient
from .fingerprint import note_attributes, watched_attributes

# torch does not type what this file takes the place of while it traces.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

_KEY = "contexts"
_native = cast(Any, torch)._C
_set_mode = _native._set_grad_enabled


@dataclass(frozen=True, slots=True)
class Contexts:
    """What surrounded a call when it was recorded.

    Attributes:
        is_grad_enabled: The mode of gradients.
        autocasts: The autocast contexts that the forward had entered: device type, dtype, enabled, cache enabled.
    """

    is_grad_enabled: bool
    autocasts: tuple[tuple[str, torch.dtype, bool, bool], ...]


@contextmanager
def entered(node: fx.Node) -> Generator[None, None, None]:
    """The contexts in which the node was recorded."""
    contexts: Contexts | None = node.meta.get(_KEY)
    if contexts is None:
        yield
        return
    with ExitStack() as stack:
        for device_type, dtype, is_enabled, is_cache_enabled in contexts.autocasts:
            stack.enter_context(torch.autocast(device_type, dtype, is_enabled, is_cache_enabled))
        if not contexts.is_grad_enabled:
            stack.enter_context(torch.no_grad())
        yield


def has_contexts(node: fx.Node) -> bool:
    """Whether `entered` does anything."""
    return _KEY in node.meta


class CustomFunction:
    """A `torch.autograd.Function` as the target of one call."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)


class ContextualTracer(fx.Tracer):
    """Notes the contexts of every call, and records custom functions as calls."""

    _autocasts: tuple[tuple[str, torch.dtype, bool, bool], ...] = ()
    _is_grad_enabled = True  # as Python code set it; within a custom function it is off

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """The graph of a run with gradients, whatever the caller's mode."""
        with torch.enable_grad(), self._watched(), watched_attributes(self.tensor_attribute) as read:
            self.attributes_read = read
            self._surroundings = _surroundings()
            graph = super().trace(root, concrete_args)
        note_attributes(graph, root, read)
        return graph

    def tensor_attribute(self, tensor: torch.Tensor) -> Any:
        """What the forward gets where it reads an attribute that is a tensor."""
        return tensor

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """As in fx, with the contexts in the node's `meta`."""
        node = super().create_node(kind, target, *args, **kwargs)
        if not kind.startswith("call"):
            return node
        if target in _DIFFERENTIATES:
            raise RuntimeError("it differentiates within its forward")
        if torch.is_inference_mode_enabled():
            raise RuntimeError("it computes in inference mode; torch.no_grad() can be traced")
        now = _surroundings()
        for name, before in self._surroundings.items():
            if now[name] != before:
                raise RuntimeError(f"it changes {name} on the way")
        if self._autocasts or not self._is_grad_enabled:
            node.meta[_KEY] = Contexts(self._is_grad_enabled, self._autocasts)
        return node

    def create_arg(self, a: Any) -> Any:
        """As in fx, which would keep a generator as an attribute of the module."""
        if isinstance(a, torch.Generator):
            raise RuntimeError("it draws from a generator of its own, whose state a recomputation would not find")
        return super().create_arg(a)

    @contextmanager
    def _watched(self) -> Generator[None, None, None]:
        """Sees autocast contexts, custom functions and changes of the random state while they happen."""
        autocast = cast(Any, torch.amp.autocast_mode.autocast)
        enter, leave = autocast.__enter__, autocast.__exit__
        tracer = self

        def seen_enter(context: Any) -> Any:
            entry = (context.device, context.fast_dtype, context._enabled, context._cache_enabled)
            tracer._autocasts = (*tracer._autocasts, entry)
            return enter(context)

        def seen_leave(context: Any, *exc: Any) -> Any:
            tracer._autocasts = tracer._autocasts[:-1]
            return leave(context, *exc)

        def seen_mode(mode: bool) -> None:
            tracer._is_grad_enabled = mode
            _set_mode(mode)

        def refuse_state(*_args: Any, **_kwargs: Any) -> None:
            raise RuntimeError("it sets the state of the random generator")

        with ExitStack() as stack:
            _replace(stack, autocast, "__enter__", seen_enter)
            _replace(stack, autocast, "__exit__", seen_leave)
            _replace(stack, torch, "set_rng_state", refuse_state)
            _replace(stack, _native, "_set_grad_enabled", seen_mode)
            for function in _subclasses(torch.autograd.Function):
                self._take_the_place_of(function, stack)
            yield

    def _take_the_place_of(self, function: type[torch.autograd.Function], stack: ExitStack) -> None:
        """Records the function's calls with proxies; `apply` is often bound to a name, but looks `forward` up."""
        original: Any = function.forward

        def forward(*args: Any) -> Any:
            leaves = tree_leaves(args)
            if not any(isinstance(leaf, Proxy) for leaf in leaves):
                return original(*args)
            inputs = args if _has_setup(function) else args[1:]
            if function is CheckpointFunction:
                return _with_gradients(inputs[0], *inputs[2:])  # the plan decides what is recomputed
            if any(callable(leaf) and not isinstance(leaf, (Proxy, torch.Tensor, type)) for leaf in inputs):
                raise RuntimeError(f"it passes code to {function.__name__}.apply")
            return self.create_proxy("call_function", CustomFunction(function), inputs, {})

        _replace(stack, function, "forward", staticmethod(forward))
        if _has_setup(function):
            setup: Any = function.setup_context

            def setup_context(context: Any, inputs: Any, output: Any) -> None:
                if not any(isinstance(leaf, Proxy) for leaf in tree_leaves(inputs)):
                    setup(context, inputs, output)

            _replace(stack, function, "setup_context", staticmethod(setup_context))


def _has_setup(function: type[torch.autograd.Function]) -> bool:
    return function.setup_context is not torch.autograd.Function.setup_context


def _subclasses(parent: type[Any]) -> list[type[Any]]:
    return [c for child in parent.__subclasses__() for c in (child, *_subclasses(child))]


def _with_gradients(function: Callable[..., Any], *args: Any) -> Any:
    _set_mode(True)
    try:
        return function(*args)
    finally:
        _set_mode(False)


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


_DIFFERENTIATES = frozenset([torch.autograd.grad, torch.autograd.backward, "backward"])


def _surroundings() -> dict[str, Any]:
    """What no node carries and must therefore stay as it is while tracing."""
    ambient = Ambient.current(())
    hooks = _native._autograd._top_saved_tensors_default_hooks(True)
    pack = None if hooks is None else hooks[0]
    is_checkpoint = getattr(pack, "__module__", None) == "torch.utils.checkpoint"
    return {
        "the algorithms of torch.backends": ambient.algorithms,
        "the default device or dtype": (ambient.default_device, ambient.default_dtype),
        "the saved-tensor hooks": None if is_checkpoint else pack,
    }
