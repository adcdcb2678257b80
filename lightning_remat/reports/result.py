"""What the callback and `find_batch_size` found: sizes, plans, peaks, and every candidate on the way."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from ..plans.plan import Plan, StepPlan


@dataclass(frozen=True, slots=True)
class Candidate:
    """One batch size that was planned.

    Attributes:
        batch_size: Samples in a batch.
        plain_peak_bytes: Predicted peak of the step without recomputation.
        predicted_peak_bytes: Predicted peak of the planned step; of the lowest one where none fits.
        recompute_overhead: Seconds of recomputation as a fraction of the plain step's; None where none fits.
        samples_per_second: Predicted throughput by the plan, of regions and optimizer; None where none fits.
        plain_samples_per_second: Predicted throughput without recomputation, whether it fits or not.
        fits: Whether a plan stays within the budget and the other limits.
        reason: Why not, where it does not.
        measured_peak_bytes: Measured peak, where the candidate was executed.
    """

    batch_size: int
    plain_peak_bytes: int
    predicted_peak_bytes: int
    recompute_overhead: float | None
    samples_per_second: float | None
    plain_samples_per_second: float
    fits: bool
    reason: str = ""
    measured_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome: `Rematerialization.result` and what `find_batch_size` returns.

    Attributes:
        batch_size: Samples in a batch (per device).
        budget_bytes: What the training step must not exceed.
        step: The plan of the whole step; its prediction was made before the step was measured.
        measured_peak_bytes: Measured peak of the planned step (two real steps with optimizer); None if a plan was
            resumed and not measured again.
        plain_peak_bytes: Peak of the step without recomputation, predicted and corrected by what was measured.
        trials: The batch sizes that were planned, in that order.
        num_steps: Real training steps run on the way.
        choice: Why this batch size.
        reserved_bytes: What a device's caching allocator is predicted to reserve for the planned step, rounding and
            fragmentation included; None on the host, which has none.
    """

    batch_size: int
    budget_bytes: int
    step: StepPlan
    measured_peak_bytes: int | None
    plain_peak_bytes: int
    trials: tuple[Candidate, ...] = ()
    num_steps: int = 0
    choice: str = ""
    reserved_bytes: int | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the first region, which is the network where there is one."""
        return self.step.plans[self.step.keys[0]]

    @property
    def predicted_peak_bytes(self) -> int:
        """Predicted peak of the planned step."""
        return self.step.predicted_peak_bytes

    @property
    def recompute_overhead(self) -> float:
        """Seconds of recomputation as a fraction of the plain step's."""
        return self.step.recompute_overhead

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured peak, less one."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1 if self.measured_peak_bytes else None

    def summary(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        return {
            "batch_size": self.batch_size,
            "planner": self.plan.planner,
            "budget_bytes": self.budget_bytes,
            "plain_peak_bytes": self.plain_peak_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "prediction_error": self.prediction_error,
            "reserved_bytes": self.reserved_bytes,
            "recompute_overhead": self.recompute_overhead,
            "num_recomputed": self.step.num_recomputed,
            "num_steps": self.num_steps,
            "choice": self.choice,
            "regions": list(self.step.keys),
            "surroundings": asdict(self.step.surroundings),
            "trials": [asdict(t) for t in self.trials],
        }

    def to_json(self) -> str:
        """The figures and the plans as JSON text."""
        plans = {name: json.loads(plan.to_json()) for name, plan in self.step.plans.items()}
        return json.dumps({**self.summary(), "plans": plans}, indent=1)
