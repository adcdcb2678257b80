"""Symbolic tracing with torch.fx: which modules are leaves, and what tracing may not leave behind."""

# The attributes of users' modules and the functions of `operator` have no types.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
import operator
import os
import random
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .contexts import ContextualTracer
from .errors import TraceError
from .hooks import has_hooks
from .python_state import PythonState

_set_rng_state = torch.set_rng_state  # while tracing, the one in torch refuses


class InPlaceProxy(fx.Proxy):
    """A proxy on which `x += y` and `x[i] = y` are recorded as the in-place operations that they are."""

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


class TensorConstant:
    """A tensor that the forward makes from constants alone, such as a table of positions."""

    __name__ = "constant"

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> Tensor:
        return self.tensor


class SymbolicTracer(ContextualTracer):
    """Traces one call; tensors of its arguments become placeholders, everything else is a constant.

    Modules of torch.nn are leaves, and so are modules with hooks (which then fire as in the plain run),
    parametrized modules, and those that `opaque` names because they cannot be traced.
    """

    def __init__(self, leaves: list[Any], spec: TreeSpec, opaque: frozenset[str]) -> None:
        super().__init__(param_shapes_constant=True)
        self.call_leaves, self.call_spec, self.opaque = leaves, spec, opaque
        self.entered: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            module_qualified_name in self.opaque
            or has_hooks(m)
            or parametrize.is_parametrized(m)
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.entered.append(self.path_of_module(m))
        random_state = torch.get_rng_state()
        result = super().call_module(m, forward, args, kwargs)
        if _draws_were_undone(random_state):
            raise RuntimeError("it draws random numbers that a trace would turn into constants")
        self.entered.pop()  # stays where an exception passes: the innermost module that failed is the last
        return result

    def create_arg(self, a: Any) -> Any:
        is_own = isinstance(a, nn.Parameter) or any(a is b for b in self.root.buffers())
        if isinstance(a, Tensor) and not is_own and a not in self.tensor_attrs:
            return self.create_node("call_function", TensorConstant(a), (), {})
        return super().create_arg(a)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return InPlaceProxy(node, self)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        placeholders = [
            self.create_proxy("placeholder", f"input_{i}", (), {}) if isinstance(leaf, Tensor) else leaf
            for i, leaf in enumerate(self.call_leaves)
        ]
        args, kwargs = tree_unflatten(placeholders, self.call_spec)

        def call(root: nn.Module) -> Any:
            return root_fn(root, *args, **kwargs)

        return call, [self.root]


def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.Graph, tuple[str, ...]]:
    """The fx graph of one call of `module`; submodules that cannot be traced become opaque leaves.

    Args:
        module: Left as it was, on error too.
        args: Positional arguments of the call, tensors real or fake.
        kwargs: Keyword arguments of the call.

    Returns:
        A graph whose placeholders are the tensors among the flattened arguments, in order; and why which submodules
        are opaque, a sentence each.

    Raises:
        TraceError: The module's own `forward` cannot be traced; names the line and the remedy.
    """
    leaves, spec = tree_flatten((args, kwargs))
    opaque: dict[str, str] = {}
    while True:
        tracer = SymbolicTracer(leaves, spec, frozenset(opaque))
        try:
            with _undisturbed(module) as changes:
                graph = tracer.trace(module)
        except Exception as error:
            where, line = _user_line(error, module)
            if not tracer.entered or tracer.entered[-1] in opaque:
                raise TraceError(
                    f"{type(module).__name__}.forward cannot be traced: {error} (at {where}: {line!r}). "
                    "Remedy: move the code that depends on values into a submodule, which is then run as one "
                    "operation, or rematerialize its submodules one by one (modules=...)",
                    where=where,
                ) from error
            path = tracer.entered[-1]
            opaque[path] = f"{path} cannot be traced and is run as one operation: {error} (at {where}: {line!r})"
            continue
        if changes:
            path, name = changes[0]
            if not path or path in opaque:
                raise TraceError(
                    f"{type(module).__name__}.forward changes {name!r}, which a recomputation would change again. "
                    "Remedy: keep it in a buffer, or move what depends on it into a submodule",
                    where=None,
                )
            opaque[path] = f"{path} changes its attribute {name!r} and is run as one operation"
            continue
        return graph, tuple(opaque.values())


@contextmanager
def _undisturbed(module: nn.Module) -> Generator[list[tuple[str, str]], None, None]:
    """Puts back what running the user's Python leaves in the modules, and the host's random states.

    Yields:
        A list that in the end names (module path, attribute) of every change that was undone.
    """
    attributes = PythonState(module)
    randoms, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - users' code draws from it
    changes: list[tuple[str, str]] = []
    try:
        yield changes
    finally:
        drew = random.getstate() != randoms or repr(np.random.get_state(legacy=False)) != repr(numpy_state)  # noqa: NPY002
        drew = _draws_were_undone(torch_state) or drew
        random.setstate(randoms)
        np.random.set_state(numpy_state)  # noqa: NPY002
        changes += attributes.put_back()
    if drew:
        raise TraceError(
            f"{type(module).__name__}.forward draws random numbers that a trace would turn into constants: from "
            "Python's or numpy's generators, or to decide what runs. Remedy: draw with torch in the shape of an input "
            "(torch.rand_like), or move the decision into a submodule, which is then run as one operation",
            where=None,
        )


def _draws_were_undone(state: Tensor) -> bool:
    """Puts torch's generator back to a state; whether it had moved."""
    with no_dispatch():  # the states are real tensors, under fake tensors too
        moved = not torch.equal(torch.get_rng_state(), state)
        if moved:
            _set_rng_state(state)
    return moved


def _user_line(error: BaseException, module: nn.Module) -> tuple[str, str]:
    """`file:line` and text of the innermost frame outside torch and this package."""
    ours = (os.path.dirname(torch.__file__), os.path.dirname(__file__))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(ours) and "importlib" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}", frame.line or ""
    try:
        return f"{inspect.getsourcefile(type(module))}", type(module).__name__
    except TypeError:
        return type(module).__module__, type(module).__name__
