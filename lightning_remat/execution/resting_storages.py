"""Storages that give up their memory in place, and get that of what their operations make again: without hooks.

What autograd saves of an operation's own is in no tensor that others have, so that only its storage can be emptied, and
be given other memory. A tape, saved for the backward alone, is emptied right after the operation has run, if all of it
can be reached from autograd's graph, and filled from that of the recomputation, reached by the same route. A result, as
that of `sigmoid`, is emptied and filled when other outputs are. `resting` tells what must hold for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from ..devices import copy_memory, give_memory, give_up_memory
from ..module_state.ambient import num_dispatch_modes
from ..operations.evaluation import Constant
from ..operations.routes import Found, Route, num_holders, reader_of

_hooks_around = cast("Callable[[bool], Any]", torch._C._autograd._top_saved_tensors_default_hooks)  # pyright: ignore

_HOLDERS = 3
"""Of the storage of a result: the tensor, what autograd saved, and who asks. A view of others would be emptied, too."""

_HOLDERS_AGAIN = 2
"""Of that of a result which was made again and is nobody's yet: the tensor, and who asks."""


_NOTHING = Found([], [], [], [])


class RestingTape:
    """The tape of an operation.

    Args:
        place: Where executions note its storages, in their tables.
        name: Of the operation, for messages.
        routes: To a tensor in each of its storages.
    """

    __slots__ = ("_error", "_holders", "_name", "_read", "place")

    def __init__(self, place: int, name: str, routes: Iterable[Route]) -> None:
        self.place, self._name, self._error = place, name, _read_too_early(name)
        self._read = reader_of(routes)
        self._holders: list[int] | None = None  # when it goes to rest

    def rest(self, values: list[Any], made: Any) -> None:
        """The tape of what an operation made gives up its memory, unless others hold it than did the first time.

        Hooks around the forward, as of a checkpoint, have it in their keeping.
        """
        if _hooks_around(True) is not None:
            return
        if (found := self._read(made)) is None:
            return
        tensors, storages, sizes, holders = found
        if self._holders is None and all(storage.resizable() for storage in storages):
            self._holders = holders
        if holders == self._holders:
            values[self.place] = storages, sizes
            for storage in storages:
                give_up_memory(storage, self._error)
            _show(tensors)

    def fill(self, values: list[Any], made: Any) -> None:
        """If it rests it gets the memory of the tape of a recomputation, which made these.

        Raises:
            RuntimeError: That is of other sizes.
        """
        if (noted := values[self.place]) is None:
            return
        storages, sizes = noted
        tensors, again, found, holders = self._read(made) or _NOTHING
        if found != sizes:
            raise _is_other(self._name, sizes, found)
        fill = give_memory if holders == self._holders else copy_memory
        for storage, other in zip(storages, again, strict=True):
            fill(other, storage)
        _show(tensors)
        if num_dispatch_modes():
            _show(torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in storages)  # pyright: ignore
        values[self.place] = None

    def resting(self, constant: Constant, made: str) -> Iterator[str]:
        """`rest` as lines of a function whose table of values is `v`."""
        yield f"{constant(self)}.rest(v, {made})"

    def filling(self, constant: Constant, made: str) -> Iterator[str]:
        """`fill` as such lines."""
        yield f"{constant(self)}.fill(v, {made})"


class RestingResult:
    """An output that autograd has saved for the backward of its own operation.

    Args:
        place: Where executions note it, in their tables.
        name: Of the operation, for messages.

    Attributes:
        count: Of those that hold the tensor when it goes to rest, once that is known; -1 before.
    """

    __slots__ = ("_error", "_name", "count", "place")

    def __init__(self, place: int, name: str) -> None:
        self.place, self._name, self._error = place, name, _read_too_early(name)
        self.count = -1

    def rest(self, values: list[Any], tensor: Tensor) -> None:
        """The tensor gives up its memory, under the conditions of a tape."""
        if _hooks_around(True) is not None:
            return
        storage = tensor.untyped_storage()
        count = cast(Any, tensor)._use_count()
        if self.count < 0:
            self.count = count
        # Memory that is lent to an array of numpy is not given up.
        if count == self.count and num_holders(storage._cdata) == _HOLDERS and storage.resizable():  # pyright: ignore
            again = tensor.data  # with a version of its own: it may be written
            values[self.place] = again, storage, storage.nbytes()
            give_up_memory(storage, self._error)
            _show([tensor])

    def fill(self, values: list[Any], output: Tensor) -> Tensor:
        """If it rests it gets the memory of the output, which was made again, and stands for it.

        Raises:
            RuntimeError: That is of another size.
        """
        if (noted := values[self.place]) is None:
            return output
        tensor, storage, size = cast("tuple[Tensor, torch.UntypedStorage, int]", noted)
        if output.nbytes != tensor.nbytes:
            raise _is_other(self._name, [tensor.nbytes], [output.nbytes])
        again = output.untyped_storage()
        is_free = again.nbytes() == size and num_holders(again._cdata) == _HOLDERS_AGAIN  # pyright: ignore
        if not (is_free and output.stride() == tensor.stride()):
            copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            output = copy.copy_(output.detach()).requires_grad_(output.requires_grad)
            again = output.untyped_storage()
        give_memory(again, storage)
        _show([output, tensor])
        values[self.place] = None
        return tensor.requires_grad_() if output.requires_grad else tensor

    def resting(self, constant: Constant, tensor: str) -> Iterator[str]:
        """`rest` as lines of a function whose table of values is `v`, with what is there almost always in place."""
        own, modes, hooks, holders = map(constant, (self, num_dispatch_modes, _hooks_around, num_holders))
        give_up, error = map(constant, (give_up_memory, self._error))
        is_free = f"{tensor}._use_count() == {own}.count and {holders}(s._cdata) == {_HOLDERS} and s.resizable()"
        yield f"s = {tensor}.untyped_storage()"
        yield f"if {is_free} and {hooks}(True) is None and not {modes}():"
        yield f"    v[{self.place}] = {tensor}.data, s, s.nbytes(); {give_up}(s, {error})"
        yield f"else: {own}.rest(v, {tensor})"
        yield "del s"

    def filling(self, constant: Constant, output: str) -> Iterator[str]:
        """`fill` as such lines."""
        holders, modes = map(constant, (num_holders, num_dispatch_modes))
        is_free = f"{holders}(s._cdata) == {_HOLDERS_AGAIN} and not ({output}.requires_grad or {modes}())"
        yield f"noted = v[{self.place}]"
        yield f"s = {output}.untyped_storage()"
        yield f"if noted and s.nbytes() == noted[2] and {output}.stride() == noted[0].stride() and {is_free}:"
        yield f"    {constant(give_memory)}(s, noted[1]); {output} = noted[0]; v[{self.place}] = None"
        yield f"else: {output} = {constant(self)}.fill(v, {output})"
        yield "del noted, s"


def _read_too_early(name: str) -> str:
    return (
        f"what {name} saved for its backward is read before it was made again. Remedy: leave it out of the rewritten "
        "modules, and please report how it came to that"
    )


def _is_other(name: str, sizes: list[int], found: list[int]) -> RuntimeError:
    return RuntimeError(
        f"{name} saved other tensors for its backward in its recomputation than in its first run (of {sizes} bytes "
        f"then, {found} now), so it does not do the same twice. Remedy: leave it out of the rewritten modules"
    )


def _show(tensors: Iterable[Tensor]) -> None:
    """Shows tensors whose storages have changed to modes such as meters, which look at what operations return."""
    if num_dispatch_modes():
        for tensor in tensors:
            tensor.detach()
