"""What the user asks of the callback and of `find_batch_size`, checked before anything runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from torch import nn

from ..budget import Budget, as_number, check_budget
from ..measure.bandwidth import Bandwidth, check_bandwidth
from ..planners import planner_of
from ..schedules.schedule import Schedule

Planner = str | Callable[..., Schedule]
BatchSize = int | Literal["auto", "keep"]

_CHOICES = {
    "objective": ("batch_size", "throughput"),
    "on_infeasible": ("raise", "minimum", "plain"),
    "on_oom": ("raise", "replan"),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of `Rematerialization`, which documents them; wrong ones raise `ValueError` here."""

    planner: Planner = "auto"
    _: KW_ONLY
    memory_budget: Budget | None = None
    batch_size: BatchSize = "auto"
    margin: float = 0.05
    objective: Literal["batch_size", "throughput"] = "batch_size"
    max_overhead: float | None = None
    min_batch_size: int = 1
    max_batch_size: int | None = None
    multiple_of: int = 1
    effective_batch_size: int | None = None
    batch_arg_name: str = "batch_size"
    rebatch_fn: Callable[[Any, int], Any] | None = None
    include_validation: bool = False
    resume: bool = True
    plan_path: str | Path | None = None
    on_infeasible: Literal["raise", "minimum", "plain"] = "raise"
    on_oom: Literal["raise", "replan"] = "raise"
    modules: Sequence[Any] | None = None
    self_check: bool = True
    compile_stretches: bool = False
    report_dir: str | Path | None = None
    gather_bandwidth: Bandwidth | None = None

    def __post_init__(self) -> None:
        planner_of(self.planner)
        if self.memory_budget is not None:
            object.__setattr__(self, "memory_budget", check_budget(self.memory_budget))
        if not (isinstance(self.batch_size, str) and self.batch_size in ("auto", "keep")):
            self._check_count("batch_size", also='"auto", "keep" or ')
        if not (_is_number(self.margin) and 0 <= self.margin < 1):
            raise ValueError(f"margin is {self.margin!r}, expected a fraction of the memory in [0, 1)")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not (isinstance(value, str) and value in choices):
                expected = " or ".join(repr(c) for c in choices)
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected {expected}")
        if self.max_overhead is not None and not (_is_number(self.max_overhead) and self.max_overhead >= 0):
            raise ValueError(f"max_overhead is {self.max_overhead!r}, expected a fraction of the plain step, 0 or more")
        for name in ("min_batch_size", "multiple_of"):
            self._check_count(name)
        for name in ("max_batch_size", "effective_batch_size"):
            if getattr(self, name) is not None:
                self._check_count(name)
        for name in ("include_validation", "resume", "self_check", "compile_stretches"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected True or False")
        for name in ("plan_path", "report_dir"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (str, os.PathLike)):
                raise ValueError(f"{name} is {value!r}, expected a path")
        self._check_sizes()
        check_bandwidth(self.gather_bandwidth)
        if not (isinstance(cast(object, self.batch_arg_name), str) and self.batch_arg_name.isidentifier()):
            raise ValueError(f"batch_arg_name is {self.batch_arg_name!r}, expected the name of an attribute")
        if self.rebatch_fn is not None and not callable(self.rebatch_fn):
            raise ValueError(f"rebatch_fn is {self.rebatch_fn!r}, expected a function (loader, batch_size) -> loader")
        if self.modules is not None and not _names_modules(self.modules):
            raise ValueError(f"modules is {self.modules!r}, expected a list of submodules or of their names")

    def _check_count(self, name: str, *, also: str = "") -> None:
        """Raises ValueError where a setting is no positive integer; one of numpy becomes one of Python."""
        value = as_number(getattr(self, name))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}, expected {also}an integer of at least 1")
        object.__setattr__(self, name, value)

    def _check_sizes(self) -> None:
        smallest = -(-self.min_batch_size // self.multiple_of) * self.multiple_of
        for name in ("max_batch_size", "effective_batch_size"):
            limit = getattr(self, name)
            if limit is not None and smallest > limit:
                raise ValueError(
                    f"{name} is {limit}, below the smallest size allowed, {smallest} (min_batch_size="
                    f"{self.min_batch_size}, multiple_of={self.multiple_of})"
                )
        if isinstance(self.batch_size, int):
            if self.batch_size % self.multiple_of:
                raise ValueError(f"batch_size is {self.batch_size}, no multiple of multiple_of={self.multiple_of}")
            if self.effective_batch_size is not None and self.effective_batch_size % self.batch_size:
                raise ValueError(
                    f"effective_batch_size is {self.effective_batch_size}, no multiple of batch_size={self.batch_size}"
                )

    @property
    def counts_scratch(self) -> bool:
        """Whether the budget is memory of the machine, of which the kernels' scratch memory takes its part.

        A budget in bytes or of the plain peak is one of what PyTorch's allocator hands out on the CPU.
        """
        return self.memory_budget is None or isinstance(self.memory_budget, float)

    def without_effect(self) -> list[str]:
        """Names of settings that were given and do nothing beside the others."""
        defaults = Settings(planner=self.planner)
        searching = ("objective", "max_overhead", "min_batch_size", "max_batch_size", "multiple_of")
        resizing = ("batch_arg_name", "rebatch_fn", "include_validation")
        idle: tuple[str, ...] = ()
        if self.batch_size == "keep":
            idle = searching + resizing
        elif self.batch_size != "auto":
            idle = searching
        if self.memory_budget is not None and not isinstance(self.memory_budget, float):
            idle += ("margin",)
        return [name for name in idle if getattr(self, name) != getattr(defaults, name)]


def _is_number(value: object) -> bool:
    return isinstance(as_number(value), (int, float)) and not isinstance(value, bool)


def _names_modules(modules: object) -> bool:
    """Whether it is a list of modules and names, not empty; a module by itself, which has a length too, is none."""
    if not isinstance(modules, (Sequence, nn.ModuleList)) or isinstance(modules, str):
        return False
    items = list(cast("Sequence[object]", modules))
    return bool(items) and all(isinstance(item, (str, nn.Module)) for item in items)
