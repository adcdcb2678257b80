"""Puts everything back that trial steps change: random states, weights, buffers, optimizers, plain attributes."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from .random_state import RandomState, generator_of, preserved_random
from .recorded_values import Recorder, Undo


@contextmanager
def preserved(modules: Iterable[nn.Module], holders: Iterable[Any] = ()) -> Generator[None]:
    """Leaves no trace of what the block did, whether it ends or raises.

    Restored are the random states (python, numpy, torch on every device), parameters and buffers in place, their
    gradients and `requires_grad`, and what the attributes of every submodule hold: numbers, tensors, arrays, random
    generators, containers, further modules (metrics in a dict, an average of the weights) and plain objects (a replay
    buffer) with their attributes, functions with what they close over. So are attributes of their classes and globals
    that methods name, where nobody has installed that code. Iterators give once more what was taken from them. Data
    sets, loaders and what other libraries run are left alone; what caches have kept cannot be put back. Values are held
    on the CPU meanwhile.

    Args:
        modules: Root modules.
        holders: Further objects whose attributes are put back likewise: optimizers, schedulers, gradient scalers.
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
    with_tensors: bool = True,
) -> Undo:
    """What puts the state of modules and holders back to what it is now, `preserved`'s random states apart.

    Args:
        modules: Root modules.
        holders: Further objects with attributes.
        with_parameters: Whether the values of parameters are recorded.
        with_gradients: Whether their gradients are.
        with_tensors: Whether the contents of other tensors and arrays are.
    """
    recorder = Recorder(with_parameters, with_gradients, with_tensors)
    for root in modules:
        recorder.add_module(root)
    for holder in holders:
        recorder.add_holder(holder)
    undo = recorder.undo

    def put_back() -> None:
        failed: list[BaseException] = []
        with torch.no_grad():
            for restore in reversed(undo):
                try:
                    restore()
                except BaseException as error:  # raised below, once all others have run
                    failed.append(error)
        if len(failed) > 1:
            raise BaseExceptionGroup("several values could not be put back", failed)
        if failed:
            raise failed[0]

    return put_back


def preserved_own_generators(module: nn.Module) -> AbstractContextManager[None]:
    """Restores the random generators that are attributes of a module and its submodules."""
    attributes = (value for m in module.modules() for value in vars(m).values())
    return RandomState(source for value in attributes if (source := generator_of(value)) is not None).restored()
