"""Random numbers of a trial come from generators of its own: the others go on in other threads meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..devices import HOST, new_generator
from .random_state import (
    RandomState,
    Source,
    device_generators,
    drawing_from,
    generator_of,
    generators_in_use,
)
from .watching import WatchingMode


class OwnDraws(WatchingMode):
    """Draws inside leave the generators that all threads share where they are.

    Whoever saves their states and puts them back takes from another thread what it has drawn in between: it draws the
    same numbers again. Operations are handed a generator instead; only those that take none (fused dropout) are run
    between a save and a restore of their own.

    Attributes:
        num_calls: Operations that it has seen so far, each of which it makes slower.
        num_draws: Random ones among them.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.num_calls = self.num_draws = 0
        self._generators: dict[torch.device, torch.Generator | None] = {}
        self._noted = ExitStack()

    def __enter__(self) -> OwnDraws:
        """What is drawn again is drawn from these generators, too."""
        self._noted.enter_context(drawing_from(self._sources))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """As before."""
        self._noted.close()
        super().__exit__(*error)  # pyright: ignore[reportUnknownMemberType]

    def _sources(self, devices: Iterable[torch.device]) -> list[Source]:
        own = [(device, self._generator(device)) for device in devices]
        found = [(device, None if generator is None else generator_of(generator)) for device, generator in own]
        return [source or device_generators([device])[0] for device, source in found]

    def runs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation; one that draws does so from a generator of this mode."""
        self.num_calls += 1
        named = dict(kwargs)
        if not draws(func, args, named) or _has_generator(args, named):
            return func(*args, **named)
        self.num_draws += 1
        device = _device(args, named)
        taking, generator = _taking_generator(func), self._generator(device)
        if taking is not None and generator is not None:
            return taking(*args, **named, generator=generator)
        with generators_in_use, RandomState(device_generators({HOST, device})).restored():
            return func(*args, **named)

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if device not in self._generators:
            self._generators[device] = new_generator(device)
        return self._generators[device]


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers: an attention does not where it drops nothing."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = kwargs.get(argument.name, args[at] if at < len(args) else argument.default_value)
            return given != 0
    return True


def _has_generator(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the caller brought one; a None is taken out."""
    if kwargs.get("generator", ...) is None:
        del kwargs["generator"]
    return any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


def _device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    found = next((a.device for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
    return found or torch.device(kwargs.get("device") or "cpu")


@cache
def _taking_generator(func: Any) -> Callable[..., Any] | None:
    """The operation itself, or its namesake, that takes a generator by name; None where there is none."""
    name = func._overloadname
    for overload in (name, "generator" if name == "default" else f"{name}_generator"):
        if overload in func.overloadpacket.overloads():
            found = getattr(func.overloadpacket, overload)
            if any(argument.name == "generator" for argument in found._schema.arguments):
                return found
    return None
