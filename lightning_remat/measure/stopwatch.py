"""Seconds of a block on a device: the clock on the CPU, events on CUDA."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Times blocks one after the other.

    Attributes:
        seconds: Duration of the last block, all its work on the device included.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._start = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def __enter__(self) -> Stopwatch:
        if self._events is not None:
            self._events[0].record()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._events is None:
            self.seconds = time.perf_counter() - self._start
            return
        self._events[1].record()
        self._events[1].synchronize()
        self.seconds = self._events[0].elapsed_time(self._events[1]) / 1000
