"""Devices by their data sheets: memory, and the speeds from which seconds are estimated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..measure.cost_model import Speed
from .usage_error import UsageError

_LAUNCH_SECONDS = 5e-6
"""Of a kernel, from Python."""

_USABLE = 0.95
"""Of a device's memory: the rest is the driver's, the context's and the allocator's."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device by its data sheet.

    Attributes:
        name: As people call it.
        memory_bytes: What a training step can have of it.
        speed: At float32.
        half_flops_per_second: At bfloat16 or float16, on dense matrices.
        is_measured: Whether the speeds were measured here and not read in a data sheet.
    """

    name: str
    memory_bytes: int | None
    speed: Speed
    half_flops_per_second: float
    is_measured: bool = False

    def speed_at(self, precision: str) -> Speed:
        """How fast it is at a precision of Lightning's."""
        if precision == "32-true":
            return self.speed
        return Speed(self.half_flops_per_second, self.speed.bytes_per_second, self.speed.launch_seconds)


SHEETS = {
    # GB, GB/s, TFLOP/s at float32, dense TFLOP/s at 16 bits
    "T4": (16, 320, 8.1, 65),
    "V100": (32, 900, 15.7, 125),
    "A100": (80, 2039, 19.5, 312),
    "A100-40GB": (40, 1555, 19.5, 312),
    "A10": (24, 600, 31.2, 125),
    "L4": (24, 300, 30.3, 121),
    "L40S": (48, 864, 91.6, 362),
    "H100": (80, 3350, 67, 989),
    "H200": (141, 4800, 67, 989),
    "B200": (180, 8000, 80, 2250),
    "RTX3090": (24, 936, 35.6, 71),
    "RTX4090": (24, 1008, 82.6, 165),
    "MI300X": (192, 5300, 163.4, 1307),
}


def device_named(name: str) -> Device:
    """The device of that name.

    Raises:
        UsageError: None is known by it.
    """
    known = {key.lower(): key for key in SHEETS}
    key = known.get(name.lower().replace(" ", "").replace("_", "-"))
    if key is None:
        raise UsageError(f"--device is {name!r}; the devices are {', '.join(SHEETS)}")
    memory, traffic, single, half = SHEETS[key]
    speed = Speed(single * 1e12, traffic * 1e9, _LAUNCH_SECONDS)
    return Device(key, int(memory * 1e9 * _USABLE), speed, half * 1e12)


def this_machine(precision: str) -> Device:
    """The processor that runs this, measured in a moment: a matrix product, a copy and a call."""
    kind = torch.float16 if precision.startswith("16") else torch.bfloat16
    size = 768
    matrix = torch.ones(size, size)
    product = 2 * size**3 / _fastest(lambda: matrix @ matrix)
    half = product
    if precision != "32-true":
        small = matrix.to(kind)
        half = 2 * size**3 / _fastest(lambda: small @ small)
    source = torch.ones(1 << 24)
    target = torch.empty_like(source)
    traffic = 2 * source.numel() * source.element_size() / _fastest(lambda: target.copy_(source))
    one = torch.ones(1)
    launch = _fastest(lambda: [one + one for _ in range(200)]) / 200
    return Device("this machine's CPU", None, Speed(product, traffic, launch), half, is_measured=True)


def _fastest(run: Callable[[], object], repeats: int = 3) -> float:
    run()
    durations: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        durations.append(time.perf_counter() - start)
    return min(durations)
