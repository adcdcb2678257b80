"""What the values of a trace are on the example inputs: their shapes, and their numbers where shapes decide them."""

# fx graphs and modules' attributes hold values of any type.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.node import map_aggregate
from torch.nn.utils.stateless import _reparametrize_module  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_leaves, tree_map_only

from ..module_state.ambient import Ambient
from ..module_state.hooks import silenced_hooks
from ..module_state.python_state import PythonState
from ..operations.contexts import entered

_set_rng_state = torch.set_rng_state  # while tracing, the one in torch refuses


class ExampleValues:
    """Runs a graph, which may still grow, as far as it is asked about.

    Tensors are fake, so nothing is computed and nothing in the module is written. Tensors that follow from sizes and
    constants alone (`torch.arange(x.shape[1])`) are real: their numbers are the same at every call of these sizes.
    """

    def __init__(self, module: nn.Module, tensors: list[Tensor]) -> None:
        """Starts from the values of the placeholders, real or fake."""
        self.module = module
        known = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
        self.mode = known or FakeTensorMode(allow_non_fake_inputs=True)
        self.tensors = [self._fake(t) for t in tensors]
        self.values: dict[fx.Node, Any] = {}
        self.is_running = False
        self.reads: set[tuple[int, str]] = set()  # attributes that the trace has read; what runs here adds none
        self.ambient = Ambient.current(sorted({"cpu", *(t.device.type for t in self.tensors)} - {"meta"}))

    def of(self, node: fx.Node) -> Any:
        """The value of a node; runs all that stands before it."""
        if node in self.values:
            return self.values[node]
        start = next(reversed(self.values)).next if self.values else next(iter(node.graph.nodes))
        reads = set(self.reads)
        self.is_running = True
        try:
            while node not in self.values:
                self.values[start] = self._run(start)
                start = start.next
        finally:
            self.is_running = False
            self.reads.intersection_update(reads)
        return self.values[node]

    def _run(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            return self.tensors[len(self.values)]
        if n.op == "get_attr":
            value: Any = self.module
            for name in str(n.target).split("."):
                value = getattr(value, name)
            return self._fake(value) if isinstance(value, Tensor) else value
        args, kwargs = map_aggregate(  # pyright: ignore[reportGeneralTypeIssues]
            (n.args, n.kwargs), lambda a: self.values[a] if isinstance(a, fx.Node) else a
        )
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if n.op != "call_module" and not any(isinstance(t, FakeTensor) for t in tensors):
            with unset_fake_temporarily(), self.ambient.restored(), entered(n):
                state = torch.get_rng_state()
                value = _called(self.module, n, args, kwargs)
                if torch.equal(torch.get_rng_state(), state):
                    return value
                _set_rng_state(state)  # its numbers are others in every call
        args, kwargs = tree_map_only(Tensor, self._fake, (args, kwargs))
        before = {t: t._version for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        with self.mode, self.ambient.restored(), torch.enable_grad(), entered(n), self._unchanged(n):
            value = _called(self.module, n, args, kwargs)
        if any(t._version != version for t, version in before.items()):
            # What was written into a tensor, or into one that it views, is not known any more.
            self.values = {k: tree_map_only(Tensor, self._fake, v) for k, v in self.values.items()}
        return value

    def _fake(self, t: Tensor) -> Tensor:
        return t if isinstance(t, FakeTensor) else self.mode.from_tensor(t)

    @contextmanager
    def _unchanged(self, n: fx.Node) -> Generator[None, None, None]:
        """The called submodule without hooks; what it changes in itself and the host's random states are put back."""
        if n.op != "call_module":
            yield
            return
        submodule = self.module.get_submodule(str(n.target))
        buffers: dict[str, Tensor] = {name: self._fake(b) for name, b in submodule.named_buffers()}
        attributes = PythonState(submodule)
        randoms: Any = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002 - users' code draws from it
        try:
            with silenced_hooks(submodule), _reparametrize_module(submodule, buffers):
                yield
        finally:
            random.setstate(randoms[0])
            np.random.set_state(randoms[1])  # noqa: NPY002
            attributes.put_back()


def _called(module: nn.Module, n: fx.Node, args: Any, kwargs: Any) -> Any:
    target: Any = n.target
    if n.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return (module.get_submodule(target) if n.op == "call_module" else target)(*args, **kwargs)
