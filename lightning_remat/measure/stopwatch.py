"""Seconds of a block on a device: the clock on the host, events on a device."""

from __future__ import annotations

import time

import torch

from ..devices import mark, timed_event


class Stopwatch:
    """Times blocks one after the other.

    Attributes:
        seconds: Duration of the last block, all its work on the device included.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._start = 0.0
        self._device = device
        self._first, self._last = timed_event(device), timed_event(device)

    def __enter__(self) -> Stopwatch:
        if self._first is not None:
            mark(self._first, self._device)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._first is None or self._last is None:
            self.seconds = time.perf_counter() - self._start
            return
        mark(self._last, self._device)
        self._last.synchronize()
        self.seconds = self._first.elapsed_time(self._last) / 1000
