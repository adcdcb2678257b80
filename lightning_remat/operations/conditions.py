"""What one run of an operation depended on besides its inputs, to run it again under the same conditions."""

# Parameters and buffers are found and exchanged where their modules keep them.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..capture.tracer import Operation
from ..module_state.ambient import buffer_values, scratch_buffers
from ..module_state.hooks import with_submodules
from ..module_state.plain_tensors import contained_tensors, holder_of, tensor_attributes
from ..module_state.python_state import PythonState
from ..module_state.random_state import Draws
from .evaluation import foreign_modules, is_foreign, submodule_at


class _Read(NamedTuple):
    """A parameter or buffer as the run found it, and the dictionary of its module that held it."""

    owner: dict[str, Any]
    key: str
    tensor: Tensor
    version: int


class Conditions:
    """Made right before the first run of an operation; `end` follows right after it.

    Random states are kept if the run moved them, copies of buffers if its result may depend on what is written later.
    Parameters are kept as they are: one that was exchanged (`functional_call`) is put in again for a recomputation, one
    that was changed in place is an error.

    Args:
        module: The traced module.
        operation: What is about to run.
        devices: Devices whose generators it may use besides the CPU's.
        written: Names of the buffers that some operation writes.
        is_fake: Whether it runs on fake tensors, which are not random.
    """

    def __init__(
        self,
        module: nn.Module,
        operation: Operation,
        devices: Iterable[torch.device],
        written: Collection[str],
        *,
        is_fake: bool,
    ) -> None:
        foreign = foreign_modules(module, operation)
        self._foreign = [(m, PythonState(m)) for m in foreign]
        self._contained = [(name, t, t._version) for m in foreign for _, name, t in contained_tensors(m)]
        is_unknown = is_foreign(operation) or bool(self._foreign)
        self._draws = None
        if (operation.is_random or is_unknown) and not is_fake:
            self._draws = Draws(devices, with_host=is_unknown)
        own = dict(_buffers(module, operation, foreign))
        # What a user's code writes may differ from call to call; a trace has seen one.
        self._scratch = list(own) if self._foreign else [name for name in own if name in written]
        kept = [name for name in self._scratch if not _only_writes(module, operation, name)]
        self._buffers = buffer_values(module, kept)
        apart = {id(own[name]) for name in self._scratch}
        self._reads = [read for read in _reads(module, operation) if id(read.tensor) not in apart]

    def end(self) -> None:
        """The first run is over."""
        if self._draws is not None and not self._draws.end():
            self._draws = None

    @contextmanager
    def restored(self, module: nn.Module) -> Generator[None, None, None]:
        """The same conditions inside; what the run inside changes is undone afterwards.

        Raises:
            RuntimeError: A parameter or buffer has been changed in place since.
        """
        with ExitStack() as stack:
            for name, tensor, version in self._contained:
                if tensor._version != version:
                    raise modified(f"a tensor in the attribute {name}", version, tensor)
            for owner, key, tensor, version in self._reads:
                if tensor._version != version:
                    raise modified(f"the parameter or buffer {_name_of(module, owner, key)}", version, tensor)
                if owner.get(key) is not tensor:
                    stack.callback(owner.__setitem__, key, owner.get(key))
                    owner[key] = tensor
            for submodule, attributes in self._foreign:
                stack.enter_context(attributes.replayed(submodule))
            stack.enter_context(scratch_buffers(module, self._scratch, self._buffers))
            if self._draws is not None:
                stack.enter_context(self._draws.replayed())
            yield


def modified(what: str, version: int, tensor: Tensor) -> RuntimeError:
    """The error of a backward that would use a value other than its forward."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at "
        f"version {tensor._version}, expected version {version}. Remedy: use the out-of-place operation, or run the "
        "backward before the change"
    )


def _called(module: nn.Module, operation: Operation) -> Iterator[tuple[str, nn.Module]]:
    for part in operation.parts:
        if part.op == "call_module":
            yield str(part.target), submodule_at(module, str(part.target))


def _attributes(operation: Operation) -> Iterator[str]:
    for part in operation.parts:
        for i in part.all_input_nodes:
            if i.op == "get_attr":
                yield str(i.target)


def _buffers(module: nn.Module, operation: Operation, foreign: Collection[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """The buffers and tensor attributes that the operation can see, by their dotted names."""
    for path, submodule in _called(module, operation):
        if submodule._modules:
            for name, buffer in submodule.named_buffers(remove_duplicate=False):
                yield f"{path}.{name}", buffer
        else:
            for name, buffer in submodule._buffers.items():
                if buffer is not None:
                    yield f"{path}.{name}", buffer
        if submodule in foreign:
            for name, tensor in tensor_attributes(submodule):
                yield f"{path}.{name}", tensor
    for name in _attributes(operation):
        path, _, leaf = name.rpartition(".")
        tensor = holder_of(submodule_at(module, path), leaf).get(leaf)
        if tensor is not None:
            yield name, tensor


def _reads(module: nn.Module, operation: Operation) -> Iterator[_Read]:
    """The parameters and buffers that the operation can see."""
    for _, called in _called(module, operation):
        for submodule in with_submodules(called):
            for owner in _owners(submodule):
                for key, tensor in owner.items():
                    if tensor is not None:
                        yield _Read(owner, key, tensor, tensor._version)
    for name in _attributes(operation):
        path, _, leaf = name.rpartition(".")
        submodule = submodule_at(module, path)
        for owner in (submodule._parameters, holder_of(submodule, leaf)):
            tensor = owner.get(leaf)
            if tensor is not None:
                yield _Read(owner, leaf, tensor, tensor._version)


def _owners(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _only_writes(module: nn.Module, operation: Operation, name: str) -> bool:
    """Whether the result cannot depend on the buffer: batch norm in training only writes its statistics."""
    owner = submodule_at(module, name.rpartition(".")[0])
    return isinstance(owner, _NormBase) and owner.training and name in operation.mutates


def _name_of(module: nn.Module, owner: dict[str, Any], key: str) -> str:
    for path, submodule in cast(Iterable[tuple[str, nn.Module]], module.named_modules()):
        if any(owner is o for o in _owners(submodule)):
            return f"{path}.{key}".lstrip(".")
    return key
