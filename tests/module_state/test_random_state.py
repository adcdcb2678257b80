"""Random numbers that are drawn again."""

from __future__ import annotations

import operator
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_remat.devices import random_state_methods
from lightning_remat.module_state.random_state import Draws, Source, generators_in_use


def test_a_replay_that_cannot_begin_leaves_the_generators_as_they_were() -> None:
    def broken(_state: object) -> None:
        raise MemoryError

    first, second = random.Random(1), random.Random(2)
    draws = Draws(
        [
            Source("the first", first.getstate, first.setstate, operator.eq),
            Source("the second", second.getstate, broken, operator.eq),
        ]
    )
    first.random(), second.random()
    draws.end()
    state = first.getstate()
    with pytest.raises(MemoryError):
        draws.begin_again()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(generators_in_use.acquire, blocking=False).result()
        other.submit(generators_in_use.release).result()
    assert first.getstate() == state


class _Module:
    """That of a kind of device, which has started where it shows generators."""

    def __init__(self, *generators: torch.Generator) -> None:
        self.default_generators = generators
        self.told: list[tuple[torch.Tensor, torch.device]] = []

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.full((1,), device.index)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.told.append((state, device))


def test_a_devices_generator_is_asked_itself_once_the_device_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    device, generator = torch.device("cuda", 1), torch.Generator()
    modules = iter([(idle := _Module()), idle, _Module(torch.Generator(), generator)])

    def module_of(_: torch.device) -> _Module:
        return next(modules)

    monkeypatch.setattr(torch, "get_device_module", module_of)
    read, write = random_state_methods(device)
    write(read())
    assert idle.told == [(torch.ones(1, dtype=torch.long), device)]

    read, write = random_state_methods(device)
    before = read()
    drawn = torch.rand(3, generator=generator)
    assert not torch.equal(read(), before)
    write(before)
    assert torch.equal(torch.rand(3, generator=generator), drawn)
