"""Symbolic tracing with torch.fx: which modules are leaves, and what tracing may not leave behind."""

# The attributes of users' modules and the functions of `operator` have no types.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
import logging
import os
import random
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.proxy import Proxy
from torch.nn.utils import parametrize
from torch.utils._mode_utils import no_dispatch

from ..errors import TraceError
from ..measure.meter import tensor_storage
from ..module_state.hooks import has_hooks
from ..module_state.nesting import Structure, flatten
from ..module_state.plain_tensors import contained_tensors, tensor_attributes
from ..module_state.python_state import PythonState
from ..operations.contexts import ContextualTracer
from .arguments import ArgumentState
from .constants import TensorConstant
from .decisions import Decision, answer
from .example_values import ExampleValues
from .factories import recorded_factories
from .proxies import StateProxy, ValueProxy, instances_of_values

logger = logging.getLogger(__name__)
_set_rng_state = torch.set_rng_state  # while tracing, the one in torch refuses


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """One call of a module as an fx graph.

    Attributes:
        graph: Its placeholders are the tensors among the flattened arguments, in order; its output a flat list.
        decisions: What the module's Python decided by sizes; other answers mean another graph.
        output_structure: Structure of what the call returns.
        reasons: Why which submodules are opaque, a sentence each.
    """

    graph: fx.Graph
    decisions: tuple[Decision, ...]
    output_structure: Structure
    reasons: tuple[str, ...]


class SymbolicTracer(ContextualTracer):
    """Traces one call; tensors of its arguments become placeholders, everything else is a constant.

    Modules of torch.nn are leaves, and so are modules with hooks (which then fire as in the plain run),
    parametrized modules, and those that `opaque` names because they cannot be traced.
    """

    def __init__(self, module: nn.Module, leaves: list[Any], structure: Structure, opaque: frozenset[str]) -> None:
        super().__init__()
        self.call_leaves, self.call_structure, self.opaque = leaves, structure, opaque
        self.entered: list[str] = []
        self.examples = ExampleValues(module, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        self.decisions: dict[tuple[fx.Node, Callable[[Any], Any]], Any] = {}
        named = (*tensor_attributes(module), *module.named_buffers(), *module.named_parameters())
        self.state = {id(t): name for name, t in named}
        self.attributes: dict[str, Proxy] = {}
        self.constants: dict[int, fx.Node] = {}
        self.made: list[torch.UntypedStorage] = []  # by factories, from constants
        self.output_structure = structure

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
        if self.examples.is_running:
            return forward(*args, **kwargs)
        self.entered.append(self.path_of_module(m))
        random_state = torch.get_rng_state()
        result = super().call_module(m, forward, args, kwargs)
        if _draws_were_undone(random_state):
            raise RuntimeError("it draws random numbers that a trace would turn into constants")
        self.entered.pop()  # stays where an exception passes: the innermost module that failed is the last
        return result

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Proxy]) -> Any:
        name = self.state.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None or self.examples.is_running:
            return attr_val
        if name not in parameter_proxy_cache:
            node = self.create_node("get_attr", name, (), {})
            parameter_proxy_cache[name] = StateProxy(self, node, attr_val)
        return parameter_proxy_cache[name]

    def tensor_attribute(self, tensor: Tensor) -> Any:
        return self.getattr("", tensor, self.attributes)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Proxy):
            return a.node
        if not isinstance(a, Tensor) or id(a) in self.state or a in self.tensor_attrs:
            return super().create_arg(a)
        if id(a) not in self.constants:
            storage = tensor_storage(a)
            constant = TensorConstant(a, is_made=any(storage is made for made in self.made))
            self.constants[id(a)] = self.create_node("call_function", constant, (), {})
        self.check_constant(self.constants[id(a)])
        return self.constants[id(a)]

    def note_made(self, tensor: Tensor) -> None:
        """A factory has made a tensor from constants."""
        storage = tensor_storage(tensor)
        if storage is not None and not self.examples.is_running:
            self.made.append(storage)

    def check_constant(self, node: fx.Node) -> None:
        """Raises if a constant was written after it had been recorded, by code that no proxy saw."""
        constant = cast(TensorConstant, node.target)
        if constant.tensor._version != constant.version:
            raise RuntimeError("it writes in place into a tensor that it made from constants and has used before")

    def proxy(self, node: fx.Node) -> Proxy:
        return ValueProxy(node, self)

    def to_bool(self, obj: Proxy) -> bool:
        return self.decided(obj, bool)

    def iter(self, obj: Proxy) -> Iterator[Proxy]:
        return iter([obj[i] for i in range(self.decided(obj, len))])  # pyright: ignore[reportIndexIssue]

    def decided(self, proxy: Proxy, kind: Callable[[Any], Any]) -> Any:
        """`kind` of the value on the example inputs, on which the trace depends from here on."""
        try:
            self.decisions[proxy.node, kind] = answer(self.examples, proxy.node, kind)
        except DataDependentOutputException as error:
            raise RuntimeError(f"{kind.__name__}() of what depends on the values of a tensor") from error
        return self.decisions[proxy.node, kind]

    def class_of(self, proxy: Proxy) -> type:
        """The class of the value; that of the proxy where no value can be had without real tensors."""
        try:
            value = self.examples.of(proxy.node)
        except Exception as error:
            logger.debug("%s has no example value: %s", proxy.node, error)
            return type(proxy)
        if isinstance(value, Tensor):
            return nn.Parameter if isinstance(value, nn.Parameter) else Tensor
        return type(value)

    def has_attribute(self, proxy: Proxy, name: str) -> bool:
        """Whether the value has an attribute."""
        return hasattr(self.examples.of(proxy.node), name)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        self.examples.reads = self.attributes_read
        placeholders = [
            self.create_proxy("placeholder", f"input_{i}", (), {}) if isinstance(leaf, Tensor) else leaf
            for i, leaf in enumerate(self.call_leaves)
        ]
        args, kwargs = self.call_structure.build(placeholders)

        before, structure = flatten((args, kwargs))

        def call(root: nn.Module) -> Any:
            leaves, self.output_structure = flatten(root_fn(root, *args, **kwargs))
            after, now = flatten((args, kwargs))
            if now != structure or any(a is not b for a, b in zip(before, after, strict=True)):
                raise RuntimeError("it changes a list, dict or dataclass that it is called with")
            return leaves

        return call, [self.root]


def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
    """The fx graph of one call of `module`; submodules that cannot be traced become opaque leaves.

    Args:
        module: Left as it was, on error too.
        args: Positional arguments of the call, tensors real or fake.
        kwargs: Keyword arguments of the call.

    Raises:
        TraceError: The module's own `forward` cannot be traced; names the line and the remedy.
    """
    leaves, structure = flatten((args, kwargs))
    arguments = ArgumentState(leaves)
    opaque: dict[str, str] = {}
    while True:
        tracer = SymbolicTracer(module, leaves, structure, frozenset(opaque))
        try:
            with _undisturbed(module) as changes, recorded_factories(tracer, tracer.note_made), instances_of_values():
                graph = tracer.trace(module)
                for constant in tracer.constants.values():
                    tracer.check_constant(constant)
        except Exception as error:
            arguments.put_back()
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
        if (changed := arguments.put_back()) is not None:
            raise TraceError(
                f"{type(module).__name__}.forward changes {changed}, which a recomputation would change again. Remedy: "
                "return what is new"
            )
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
        decisions = tuple((node, kind, found) for (node, kind), found in tracer.decisions.items())
        return Capture(graph, decisions, tracer.output_structure, tuple(opaque.values()))


@contextmanager
def _undisturbed(module: nn.Module) -> Generator[list[tuple[str, str]], None, None]:
    """Puts back what running the user's Python leaves in the modules, and the host's random states.

    Yields:
        A list that in the end names (module path, attribute) of every change that was undone.
    """
    attributes = PythonState(module)
    contained = [(place, t, t._version, t.detach().clone()) for *place, t in contained_tensors(module)]
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
        for (path, name), tensor, version, value in contained:
            if tensor._version != version:
                tensor.copy_(value)
                changes.append((path, name))
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
    ours = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(ours) and "importlib" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}", frame.line or ""
    try:
        return f"{inspect.getsourcefile(type(module))}", type(module).__name__
    except TypeError:
        return type(module).__module__, type(module).__name__
