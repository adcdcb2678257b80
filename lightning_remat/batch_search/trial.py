"""A training step that can be tried at any batch size, and the memory model made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from ..graph import Graph
from ..profiler import profile
from ..regions import Call
from ..rematerializer import rematerialize
from ..rewriter import restore
from ..step_memory import Surroundings
from ..step_planner import StepPlan
from ..tracer import trace
from .batch_scaling import Line, ScalableGraph, scaled_surroundings

T = TypeVar("T")

STEPS_PER_TRIAL = 2
"""The second step is the first in which optimizer state and gradients are alive in the forward."""


class Trial(Protocol):
    """A training step that leaves no trace.

    Attributes:
        device: Where it runs.
        batch_size: Samples in the batch as the loader yields it.
        num_devices: Devices that train side by side.
        most_samples: The largest batch that the data can fill; None if unknown.
    """

    device: torch.device
    batch_size: int
    num_devices: int
    most_samples: int | None

    def look_through(self, batch_size: int) -> list[Call]:
        """The regions' calls at that batch size, without a backward."""
        ...

    def precision(self) -> AbstractContextManager[Any]:
        """The context (autocast) in which the step runs its forward."""
        ...

    def surroundings(self, calls: Sequence[Call], batch_size: int) -> Surroundings:
        """What is alive beside the regions."""
        ...

    def measure(self, batch_size: int, *, with_scratch: bool) -> int:
        """The measured peak of `STEPS_PER_TRIAL` real steps with backward and optimizer, in bytes.

        With scratch, all counts that the device must have for them (`meter.measure_peak`).
        """
        ...

    def alive_bytes(self) -> int:
        """Bytes on the device before the search, which count in the budget and are not free."""
        ...

    def share(self, compute: Callable[[], T]) -> T:
        """What `compute` returns on rank 0, on every rank; its error likewise."""
        ...

    def least(self, value: int) -> int:
        """The least of the ranks' values."""
        ...


@dataclass(frozen=True, slots=True)
class StepModel:
    """Bytes and seconds of the step at any batch size (exactly one, where it was profiled once).

    Attributes:
        keys: The regions' names in the order of their calls.
        line: The two profiled sizes; None where there is one.
        graphs: Region name → its profile, or profiles at two sizes.
        around: What is alive beside the regions at the one or two sizes.
        correction_bytes: What a measured step needed beyond the prediction.
        correction_size: The batch size of that step.
    """

    keys: tuple[str, ...]
    line: Line | None
    graphs: dict[str, ScalableGraph | Graph]
    around: tuple[Surroundings, ...]
    correction_bytes: int = 0
    correction_size: int = 1

    def graphs_at(self, size: int) -> dict[str, Graph]:
        """The regions' operations at a batch size."""
        return {k: g.at(size) if isinstance(g, ScalableGraph) else g for k, g in self.graphs.items()}

    def surroundings_at(self, size: int) -> Surroundings:
        """What is alive beside the regions, as corrected. A correction grows with the batch and never shrinks to less
        than it was measured, being loss and metrics in part and constant in part."""
        around = self.around[0]
        if self.line is not None:
            around = scaled_surroundings(self.line, around, self.around[1], size)
        scale = max(1.0, size / self.correction_size) if self.correction_bytes > 0 else 1.0
        return replace(around, correction_bytes=int(self.correction_bytes * scale))

    def corrected(self, excess_bytes: int, size: int) -> StepModel:
        """The model after a step of batch size `size` needed `excess_bytes` more than predicted."""
        total = self.surroundings_at(size).correction_bytes + excess_bytes
        return replace(self, correction_bytes=total, correction_size=size)


def model_step(trial: Trial, sizes: Sequence[int], *, with_scratch: bool) -> StepModel:
    """Profiles the step at one batch size (exact there), or at two (linear in between and beyond)."""
    profiles: list[dict[str, Graph]] = []
    around: list[Surroundings] = []
    keys: list[tuple[str, ...]] = []
    for size in sizes:  # one at a time: a call holds its batch
        calls = trial.look_through(size)
        keys.append(tuple(call.name for call in calls))
        profiles.append(_profile_calls(trial, calls, with_scratch))
        around.append(trial.surroundings(calls, size))
    if len(sizes) == 1:
        return StepModel(keys[0], None, {**profiles[0]}, tuple(around))
    line = Line(*sizes)
    graphs: dict[str, ScalableGraph | Graph] = {
        key: ScalableGraph(line, profiles[0][key], profiles[1][key]) for key in profiles[0]
    }
    return StepModel(keys[0], line, graphs, tuple(around))


def _profile_calls(trial: Trial, calls: Sequence[Call], with_scratch: bool) -> dict[str, Graph]:
    graphs: dict[str, Graph] = {}
    with trial.precision():
        for call in calls:
            if call.name not in graphs:
                traced = trace(call.module, *call.args, **call.kwargs)
                graphs[call.name] = profile(traced, *call.args, with_scratch=with_scratch, **call.kwargs)
    return graphs


def install(trial: Trial, calls: Sequence[Call], step: StepPlan) -> None:
    """Rewrites every region by its plan; on an error none."""
    done: set[str] = set()
    try:
        with trial.precision():
            for call in calls:
                if call.name not in done:
                    done.add(call.name)
                    rematerialize(call.module, *call.args, plan=step.plans[call.name], **call.kwargs)
    except BaseException:
        uninstall([call.module for call in calls])
        raise


def uninstall(modules: Iterable[nn.Module]) -> None:
    """Undoes `install`."""
    for module in modules:
        restore(module)
