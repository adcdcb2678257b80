"""A thread that draws random numbers meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def drawing_beside() -> Generator[None]:
    """Another thread draws from torch's generator within the block, the numbers that it would draw alone."""
    expected = torch.rand(1_000_000, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(5)
    drawn: list[Tensor] = []
    is_done = threading.Event()

    def draw() -> None:
        while not is_done.is_set() and len(drawn) < len(expected):
            drawn.append(torch.rand(1))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
    assert drawn
    assert torch.equal(torch.cat(drawn), expected[: len(drawn)])
