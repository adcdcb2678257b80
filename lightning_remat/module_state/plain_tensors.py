"""Tensors that modules hold beside parameters and buffers: as attributes, or in lists and dicts that are attributes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

_INTERNAL = frozenset(vars(nn.Module()))


def tensor_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Dotted name and value of the attributes, of the module and all inside, that are tensors without gradients."""
    for path, m in _named(module):
        for name, value in vars(m).items():
            if isinstance(value, Tensor) and not value.requires_grad:
                yield f"{path}.{name}".lstrip("."), value


def contained_tensors(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Module path, name of the attribute, and tensor, of the tensors without gradients in lists, dicts and tuples."""
    for path, m in _named(module):
        for name, value in vars(m).items():
            if not isinstance(value, Tensor) and _holds_tensors(name, value):
                for leaf in tree_leaves(value):
                    if isinstance(leaf, Tensor) and not leaf.requires_grad and not leaf.is_inference():
                        yield path, name, leaf


@contextmanager
def plain_tensors_apart(module: nn.Module, copy: Callable[[Tensor], Tensor]) -> Generator[None, None, None]:
    """The module with copies in place of these tensors, so that what runs inside leaves no trace in them."""
    copies: dict[int, Tensor] = {}
    originals: list[tuple[dict[str, Any], str, Any]] = []

    def apart(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = copy(tensor)
        return copies[id(tensor)]

    for _, m in _named(module):
        holder: dict[str, Any] = vars(m)
        originals += [(holder, name, value) for name, value in holder.items() if _holds_tensors(name, value)]
    try:
        for holder, name, value in originals:
            holder[name] = tree_map_only(Tensor, apart, value)
        yield
    finally:
        for holder, name, value in originals:
            holder[name] = value


def holder_of(owner: nn.Module, name: str) -> dict[str, Any]:
    """The dictionary that holds a buffer or a tensor attribute of a module."""
    buffers: dict[str, Any] = owner._buffers  # pyright: ignore[reportPrivateUsage]
    return buffers if name in buffers else vars(owner)


def _holds_tensors(name: str, value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    is_container = isinstance(value, (dict, list, tuple)) and name not in _INTERNAL
    return is_container and any(isinstance(leaf, Tensor) for leaf in tree_leaves(cast(Any, value)))


def _named(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    return cast(Iterable[tuple[str, nn.Module]], module.named_modules())
