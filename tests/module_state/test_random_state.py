"""Random numbers that are drawn again."""

from __future__ import annotations

import operator
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

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
    with pytest.raises(MemoryError), draws.replayed():
        pass
    with ThreadPoolExecutor(1) as other:
        assert other.submit(generators_in_use.acquire, blocking=False).result()
        other.submit(generators_in_use.release).result()
    assert first.getstate() == state
