"""For scripts that run beside others: what recomputations cost is assumed, and not measured anew by each process."""

from __future__ import annotations

from lightning_remat.execution import rerun_prices


def assume_prices() -> None:
    """From here on this process knows what a usual machine would measure."""
    rerun_prices._measured = lambda: rerun_prices.RerunPrices(run=0.0, stretch=130e-6, tape=70e-6, hook=80e-6)
