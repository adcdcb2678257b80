"""The device of the tests as Lightning knows devices."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy


class LedgerAccelerator(Accelerator):
    """What Lightning asks of a kind of device."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        torch.accelerator.empty_cache()

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("ledger", n) for n in range(int(devices))]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "ledger"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return dict(torch.accelerator.memory_stats(device))


def on_device(device: torch.device, precision: Literal["32-true", "bf16-mixed"] = "32-true") -> dict[str, Any]:
    """Options of one trainer on one device."""
    if device.type != "ledger":
        return {"accelerator": "gpu" if device.type == "cuda" else device.type, "precision": precision}
    plugin = Precision() if precision == "32-true" else MixedPrecision(precision, device.type)
    strategy = SingleDeviceStrategy(device, LedgerAccelerator(), precision_plugin=plugin)
    return {"accelerator": "auto", "strategy": strategy}
