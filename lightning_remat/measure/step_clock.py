"""Throughput and peak memory between two log steps, without a synchronization a step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from ..devices import counts_memory, most_bytes, start_counting, synchronize
from .allocated_growth import Peak, can_listen, listened
from .meter import tensor_storage
from .resident_memory import ResidentGrowth


@dataclass(frozen=True, slots=True)
class Reading:
    """What happened since the last reading.

    Attributes:
        step_seconds: Wall time a step, data loading included and validation left out.
        samples_per_second: On this device.
        peak_bytes: Most memory alive; where no allocator counts, during the last step of the interval, which alone is
            metered. None if none was.
    """

    step_seconds: float
    samples_per_second: float
    peak_bytes: int | None


class StepClock:
    """Counts steps and samples between readings; stands still during validation.

    Attributes:
        meters_steps: Whether memory has to be listened to, step by step.
    """

    def __init__(self, device: torch.device, *, with_scratch: bool = False) -> None:
        self.device, self._with_scratch = device, with_scratch
        self._elapsed, self._started = 0.0, 0.0
        self._is_running = False
        self._num_steps = self._num_samples = 0
        self._stack = ExitStack()
        self._peak: Peak | None = None
        self._resident: ResidentGrowth | None = None
        self._most_bytes = 0
        self.meters_steps = not counts_memory(device)

    def start(self) -> None:
        """Runs on, if it stood still."""
        if not self._is_running:
            if not self.meters_steps:
                start_counting(self.device)
            self._started, self._is_running = time.perf_counter(), True

    def stop(self) -> None:
        """Stands still until the next `start`."""
        if self._is_running:
            synchronize(self.device)
            self._elapsed += time.perf_counter() - self._started
            self._is_running = False
            if not self.meters_steps:
                self._most_bytes = max(self._most_bytes, most_bytes(self.device))

    def meter(self, alive: Iterable[Tensor]) -> None:
        """Meters memory until `close`, where no profiler listens to it; a device's allocator always does.

        Args:
            alive: What is held at the start.
        """
        if not (self.meters_steps and can_listen()):
            return
        self.close()
        storages = {id(s): s for s in map(tensor_storage, alive) if s is not None}
        self._peak = self._stack.enter_context(listened(storages.values()))
        if self._with_scratch:
            self._resident = ResidentGrowth()

    def count(self, num_samples: int) -> None:
        """One more step."""
        self._num_steps += 1
        self._num_samples += num_samples

    def read(self) -> Reading | None:
        """What happened since the last reading; None if no step was counted."""
        self.close()
        if not self._num_steps:
            return None
        self.stop()
        if self.meters_steps:
            peak_bytes = self._peak.peak_bytes if self._peak is not None else None
            self._peak = None
        else:
            peak_bytes, self._most_bytes = self._most_bytes, 0
        seconds = max(self._elapsed, 1e-9)
        reading = Reading(seconds / self._num_steps, self._num_samples / seconds, peak_bytes)
        self._elapsed, self._num_steps, self._num_samples = 0.0, 0, 0
        self.start()
        return reading

    def close(self) -> None:
        """Ends a metering, on errors too."""
        self._stack.close()
        if self._peak is not None and self._resident is not None:
            self._peak.peak_bytes = max(self._peak.peak_bytes, self._peak.start_bytes + self._resident.finish())
            self._resident = None
