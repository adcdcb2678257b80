"""One run of an fx graph that notes, value by value, what aliases what and what each operation writes."""

from __future__ import annotations

import logging
import operator
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module  # pyright: ignore[reportPrivateUsage,reportUnknownVariableType]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import TraceError
from ..measure.meter import tensor_storage
from ..module_state.hooks import silenced_hooks
from ..module_state.nesting import flatten
from ..module_state.plain_tensors import contained_tensors, plain_tensors_apart, tensor_attributes
from ..module_state.python_state import PythonState
from ..operations.contexts import entered
from .constants import TensorConstant

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Record:
    """What one fx node did.

    Attributes:
        has_tensors: Whether its value holds tensors; a value without is a constant of the step (a shape, a number).
        views: The fx nodes that own the storages in which its value lives, other than itself.
        owns: Whether its value has a storage of its own.
        writes: The fx nodes that own the storages that it wrote in place.
        buffers: Names of the buffers that it wrote.
        is_random: Whether it drew random numbers.
        is_permuted: Whether a tensor in its value has its dimensions in another order in memory.
        returned: For a module's value that holds several, or an item of it: the inputs of the module that it holds
            themselves, by the `id` of the tensor while it lives.
        is_returned: The input that its value, an item of such a value, is itself.
    """

    has_tensors: bool = False
    views: set[fx.Node] = field(default_factory=set[fx.Node])
    owns: bool = False
    writes: set[fx.Node] = field(default_factory=set[fx.Node])
    buffers: tuple[str, ...] = ()
    is_random: bool = False
    is_permuted: bool = False
    returned: dict[int, fx.Node] = field(default_factory=dict[int, fx.Node])
    is_returned: fx.Node | None = None


def record(module: nn.Module, graph: fx.Graph, tensors: list[Tensor]) -> dict[fx.Node, Record]:
    """Runs `graph` once on fake tensors and tells what every node did.

    Real inputs and parameters are replaced by fake ones, so nothing is computed and the module stays as it was. Code
    that needs values runs on the real tensors instead, with the buffers and the random state put back.

    Args:
        module: What the graph was captured from.
        graph: The captured graph.
        tensors: The values of its placeholders.
    """
    attributes = PythonState(module)
    try:
        return _record(module, graph, tensors)
    finally:
        attributes.put_back()


def written_buffers(records: dict[fx.Node, Record]) -> set[fx.Node]:
    """The nodes that fetch a buffer which the module writes somewhere."""
    names = {name for entry in records.values() for name in entry.buffers}
    return {n for n in records if n.op == "get_attr" and n.target in names}


def _record(module: nn.Module, graph: fx.Graph, tensors: list[Tensor]) -> dict[fx.Node, Record]:
    if any(isinstance(t, FakeTensor) for t in tensors):
        mode = next(t.fake_mode for t in tensors if isinstance(t, FakeTensor))
        with mode, buffers_apart(module):
            return _Recorder(module, graph).record(tensors)
    try:
        with fake_copies(module, tensors) as fakes:
            return _Recorder(module, graph).record(fakes)
    except TraceError:
        raise
    except Exception as error:  # code that needs values: numpy, .item(), a custom kernel without a fake version
        logger.info("%s needs real values to be captured: %s", type(module).__name__, error)
        devices = list({t.device for t in tensors if t.device.type == "cuda"})
        with torch.random.fork_rng(devices), buffers_apart(module):  # pyright: ignore[reportUnknownMemberType]
            try:
                return _Recorder(module, graph).record([t.detach() for t in tensors])
            except (TraceError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise TraceError(
                    f"{type(module).__name__} runs as a whole, but not operation by operation: {error}. Remedy: leave "
                    "out the submodule that differentiates through others or depends on them otherwise (modules=...)"
                ) from error


@contextmanager
def fake_copies(module: nn.Module, tensors: list[Tensor]) -> Generator[list[Tensor], None, None]:
    """Fake tensors like `tensors`, the module with fake ones in place of its own meanwhile."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tied = {id(t): mode.from_tensor(t) for _, t in _named_tensors(module)}
    fakes: dict[str, Tensor] = {name: tied[id(t)] for name, t in _named_tensors(module)}
    with mode, _reparametrize_module(module, fakes), plain_tensors_apart(module, mode.from_tensor):
        yield [mode.from_tensor(t) for t in tensors]


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


@contextmanager
def buffers_apart(module: nn.Module) -> Generator[None, None, None]:
    """The module with copies in place of its buffers and plain tensors: what runs inside leaves no trace in them."""
    originals: list[tuple[nn.Module, str, Tensor]] = []
    copies: dict[int, Tensor] = {}
    for m in module.modules():
        for name, buffer in m._buffers.items():  # pyright: ignore[reportPrivateUsage]
            if buffer is not None:
                originals.append((m, name, buffer))
                copies.setdefault(id(buffer), buffer.detach().clone())
    try:
        for m, name, buffer in originals:
            m._buffers[name] = copies[id(buffer)]  # pyright: ignore[reportPrivateUsage]
        with plain_tensors_apart(module, lambda t: t.detach().clone()):
            yield
    finally:
        for m, name, buffer in originals:
            m._buffers[name] = buffer  # pyright: ignore[reportPrivateUsage]


class WriteWatch(TorchDispatchMode):
    """Notes random operations and writes to running statistics, which batch norm's schema does not declare."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.is_random = False
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.is_random = True
        if any(isinstance(a, torch.Generator) for a in (*args, *(kwargs or {}).values())):
            raise TraceError(
                f"{func} draws from a generator of its own, whose state a recomputation would not find. Remedy: draw "
                "from the default generator, or leave the submodule out (modules=...)"
            )
        if "batch_norm" in func.__name__ and "backward" not in func.__name__ and len(args) > 5 and args[5] is True:
            for statistic in args[3:5]:
                if isinstance(statistic, Tensor):
                    self.written.add(id(statistic))
        return func(*args, **(kwargs or {}))


class _Recorder(fx.Interpreter):
    """Runs node by node without gradients, freeing values after their last use."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self.root = module
        self.records: dict[fx.Node, Record] = {}
        self.owners: dict[int, tuple[torch.UntypedStorage, fx.Node]] = {}

    def record(self, tensors: list[Tensor]) -> dict[fx.Node, Record]:
        """Runs the graph on the values of its placeholders."""
        with torch.no_grad():
            self.run(*tensors)
        return self.records

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        submodule = self.root.get_submodule(target)
        contained = [(name, t, t._version) for _, name, t in contained_tensors(submodule)]
        before, structure = flatten((args, kwargs))  # fx itself forbids to change lists and dicts, but not dataclasses
        # With gradients, as in a step: users' code may ask for them, or differentiate within its forward.
        with silenced_hooks(submodule), torch.enable_grad():
            given = {id(leaf) for leaf in before}
            value = super().call_module(target, args, kwargs)
            value = tree_map_only(Tensor, lambda t: t if id(t) in given else t.detach(), value)
        for name, tensor, version in contained:
            if tensor._version != version:
                raise TraceError(
                    f"{target} writes in place into a tensor in its attribute {name!r}, which a recomputation would "
                    "write again. Remedy: keep it in a buffer (register_buffer(..., persistent=False))"
                )
        after, now = flatten((args, kwargs))
        if now != structure or any(a is not b for a, b in zip(before, after, strict=True)):
            raise TraceError(f"{target} changes a dataclass that it is called with, which a trace cannot follow")
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, TensorConstant):
            return target.copy()
        return super().call_function(target, args, kwargs)

    def fetch_attr(self, target: str) -> Any:
        value: Any = self.root
        for name in target.split("."):
            value = getattr(value, name)
        return value

    def run_node(self, n: fx.Node) -> Any:
        inputs = {i: [t for t in tree_leaves(self.env[i]) if isinstance(t, Tensor)] for i in n.all_input_nodes}
        before = {t: t._version for tensors in inputs.values() for t in tensors if not t.is_inference()}
        owned = self._buffers_of(n, inputs)
        buffers_before = [(name, b, b._version, _values(b)) for name, b in owned]
        watch = WriteWatch()
        with entered(n), watch if n.op.startswith("call") else nullcontext():
            value = super().run_node(n)
        entry = self.records[n] = Record(is_random=watch.is_random)
        entry.buffers = tuple(
            name
            for name, b, version, values in buffers_before
            if b._version != version or id(b) in watch.written or (values is not None and not torch.equal(values, b))
        )
        for i, tensors in inputs.items():
            if any(t in before and t._version != before[t] for t in tensors):
                entry.writes |= {o for t in tensors for o in self._owner(t)} or {i}
        if n.op != "output":
            tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
            entry.has_tensors = bool(tensors)
            entry.is_permuted = any(map(_is_permuted, tensors))
            for t in tensors:
                owners = self._owner(t)
                entry.views |= set(owners) - {n}
                if not owners:
                    entry.owns = True
                    storage = tensor_storage(t)
                    if storage is not None:
                        self.owners[storage._cdata] = (storage, n)  # pyright: ignore[reportPrivateUsage]
            self._note_returned(n, value)
        return value

    def _note_returned(self, n: fx.Node, value: Any) -> None:
        entry, source = self.records[n], n.args[0] if n.target is operator.getitem else None
        if n.op == "call_module" and not entry.writes and not isinstance(value, Tensor):
            held = {id(t) for t in tree_leaves(value)}
            passed = ((id(self.env[i]), i) for i in n.all_input_nodes if isinstance(self.env[i], Tensor))
            entry.returned = {key: i for key, i in passed if key in held and i.op != "get_attr"}
        elif isinstance(source, fx.Node) and isinstance(value, Tensor):
            entry.is_returned = self.records[source].returned.get(id(value))
        elif isinstance(source, fx.Node):
            entry.returned = self.records[source].returned

    def _buffers_of(self, n: fx.Node, inputs: dict[fx.Node, list[Tensor]]) -> list[tuple[str, Tensor]]:
        if n.op == "call_module":
            leaf = self.root.get_submodule(str(n.target))
            held = (*leaf.named_buffers(remove_duplicate=False), *tensor_attributes(leaf))
            return [(f"{n.target}.{name}", b) for name, b in held]
        return [(str(i.target), t) for i, tensors in inputs.items() if i.op == "get_attr" for t in tensors]

    def _owner(self, t: Tensor) -> list[fx.Node]:
        storage = tensor_storage(t)
        known = None if storage is None else self.owners.get(storage._cdata)  # pyright: ignore[reportPrivateUsage]
        return [] if known is None else [known[1]]


def _is_permuted(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    strides = [stride for stride, size in zip(tensor.stride(), tensor.size(), strict=True) if size > 1]
    return any(outer < inner for outer, inner in pairwise(strides))


def _values(buffer: Tensor) -> Tensor | None:
    return None if isinstance(buffer, FakeTensor) else buffer.clone()
