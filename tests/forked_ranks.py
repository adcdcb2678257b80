"""Processes of one group, forked from one: what each would import and measure anew takes longer than what they test."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable

from lightning.fabric.plugins.environments.lightning import find_free_network_port

from lightning_remat.execution import rerun_prices

PATIENCE_SECONDS = 60
"""How long others may take to end after the first; then they are stopped."""


def run_ranks(num_ranks: int, run: Callable[[], None]) -> None:
    """Calls `run` in as many processes, the first of which is this one.

    The environment is that of processes which a launcher has started, as Lightning and PyTorch expect it. Nothing may
    have run before that starts threads.

    Raises:
        SystemExit: Another process has failed.
    """
    port = str(find_free_network_port())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)}
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=_run, args=(rank, run), daemon=True) for rank in range(1, num_ranks)]
    for process in others:
        process.start()
    try:
        _run(0, run)
    finally:
        for process in others:
            process.join(PATIENCE_SECONDS)
    if codes := [process.exitcode for process in others if process.exitcode != 0]:
        sys.exit(f"other processes have ended with {codes}")


def _run(rank: int, run: Callable[[], None]) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank)}
    # As if each had measured: no two find the same.
    usual = rerun_prices.RerunPrices(run=0.0, rest=10e-6, own_rest=0.0, stretch=130e-6, tape=70e-6, hook=80e-6)
    prices = rerun_prices.RerunPrices(*(price * (1 + rank / 10) for price in usual))
    rerun_prices._measured = lambda: (prices, lambda: 1.0)
    run()
