"""Functions that make tensors from sizes: recorded while a module is traced, where a size is not a constant."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import Proxy
from torch.utils._pytree import tree_leaves

FACTORIES = (
    "arange empty empty_strided eye full hamming_window hann_window linspace logspace normal ones rand randint "
    "randn randperm scalar_tensor tensor tril_indices triu_indices zeros"
)


@contextmanager
def recorded_factories(tracer: fx.Tracer, note: Callable[[Tensor], None]) -> Generator[None, None, None]:
    """Calls of torch's factories with a proxy among their arguments become nodes, which no dispatch would make them.

    Args:
        tracer: Makes the nodes.
        note: Is told of what the other calls make.
    """
    originals: dict[str, Callable[..., Any]] = {name: getattr(torch, name) for name in FACTORIES.split()}

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(a, Proxy) for a in tree_leaves((args, kwargs))):
                return tracer.create_proxy("call_function", function, args, kwargs)
            made = function(*args, **kwargs)
            note(made)
            return made

        return call

    try:
        for name, function in originals.items():
            setattr(torch, name, recording(function))
        yield
    finally:
        for name, function in originals.items():
            setattr(torch, name, function)
