"""Puts everything back that trial steps change: random states, weights, buffers, optimizers, plain attributes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

Undo = Callable[[], None]


@contextmanager
def preserved(modules: Iterable[nn.Module], holders: Iterable[Any] = ()) -> Generator[None]:
    """Leaves no trace of what the block did, whether it ends or raises.

    Restored are the random states (python, numpy, torch on every device), parameters and buffers in place, their
    gradients and `requires_grad`, and the plain attributes of every submodule (numbers, tensors, lists, dicts, sets;
    thus metric states and training flags). Values are held on the CPU meanwhile.

    Args:
        modules: Root modules.
        holders: Further objects whose attributes are put back likewise: optimizers, gradient scalers.
    """
    put_back = record(modules, holders)
    with preserved_random():
        try:
            yield
        finally:
            put_back()


def record(
    modules: Iterable[nn.Module],
    holders: Iterable[Any] = (),
    *,
    with_parameters: bool = True,
    with_gradients: bool = True,
) -> Undo:
    """What puts the state of modules and holders back to what it is now, `preserved`'s random states apart.

    Args:
        modules: Root modules.
        holders: Further objects with attributes.
        with_parameters: Whether the values of parameters are recorded.
        with_gradients: Whether their gradients are.
    """
    undo: list[Undo] = []
    recorded: set[int] = set()
    for root in modules:
        for module in root.modules():
            if id(module) not in recorded:
                recorded.add(id(module))
                undo.append(_record_module(module, with_parameters, with_gradients))
    undo += [_record_attributes(holder, recorded) for holder in holders]

    def put_back() -> None:
        with torch.no_grad(), ExitStack() as stack:  # every undo runs, even where another one fails
            for restore in undo:
                stack.callback(restore)

    return put_back


@contextmanager
def preserved_random() -> Generator[None]:
    """Restores the random states of python, numpy and torch on every device."""
    put_back = record_random()
    try:
        yield
    finally:
        put_back()


def record_random() -> Undo:
    """What puts the random states of python, numpy and torch on every device back to what they are now."""
    # numpy's global state is the one that users' data sets draw from.
    numpy_state = cast(Any, np.random.get_state(legacy=False))  # noqa: NPY002
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def put_back() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(torch_state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return put_back


def _record_module(module: nn.Module, with_parameters: bool, with_gradients: bool) -> Undo:
    parameters = list(module.parameters(recurse=False))
    undo = [_record_value_of(p) for p in parameters if with_parameters]
    undo += [_record_gradient(p) for p in parameters if with_gradients]
    attributes = _record_attributes(module, set())

    def put_back() -> None:
        attributes()  # first: it restores which tensors the buffers are
        for restore in undo:
            restore()

    return put_back


def _record_value_of(parameter: nn.Parameter) -> Undo:
    value, requires_grad = _held(parameter), parameter.requires_grad

    def put_back() -> None:
        parameter.requires_grad_(requires_grad)
        parameter.detach().copy_(value)

    return put_back


def _record_gradient(parameter: nn.Parameter) -> Undo:
    grad = parameter.grad
    value = None if grad is None else _held(grad)

    def put_back() -> None:
        parameter.grad = grad
        if grad is not None and value is not None:
            grad.detach().copy_(value)

    return put_back


def _record_attributes(holder: Any, seen: set[int]) -> Undo:
    state = cast(dict[str, Any], vars(holder))
    before: dict[str, Any] = dict(state)
    undo = [u for u in (_record_value(v, seen) for v in before.values()) if u is not None]

    def put_back() -> None:
        state.clear()
        state.update(before)
        for restore in undo:
            restore()

    return put_back


def _record_value(value: Any, seen: set[int]) -> Undo | None:
    """How to restore the content of a tensor or plain container in place; None where there is nothing to restore."""
    if isinstance(value, nn.Parameter):
        return None  # recorded with its module; optimizers' lists of parameters name them again
    if isinstance(value, Tensor):
        return _record_tensor(value, seen)
    if not isinstance(value, (dict, list, set, deque, tuple)) or id(cast(Any, value)) in seen:
        return None
    container = cast(Any, value)
    seen.add(id(container))
    is_mapping = isinstance(value, dict)
    items: list[Any] = list(container.values() if is_mapping else container)
    content: Any = dict(container) if is_mapping else items
    undo = [u for u in (_record_value(item, seen) for item in items) if u is not None]

    def put_back() -> None:
        if not isinstance(value, tuple):
            container.clear()
            (container.update if isinstance(value, (dict, set)) else container.extend)(content)
        for restore in undo:
            restore()

    return put_back


def _record_tensor(tensor: Tensor, seen: set[int]) -> Undo | None:
    if id(tensor) in seen or tensor.layout is not torch.strided or tensor.is_inference():
        return None
    seen.add(id(tensor))
    value = _held(tensor)

    def put_back() -> None:
        if tensor.shape == value.shape:
            tensor.detach().copy_(value)
        else:
            cast(Any, tensor.detach()).set_(value.to(tensor.device))

    return put_back


def _held(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
