"""Processes of one group, forked from one: to import all anew in each takes longer than most of what they do."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable

PATIENCE_SECONDS = 60
"""How long others may take to end after the first; then they are stopped."""


def run_ranks(num_ranks: int, run: Callable[[int], None]) -> None:
    """Calls `run` with each rank, each in a process of its own, the first in this one.

    The environment is that of processes which a launcher has started, as Lightning and PyTorch expect it. Nothing may
    have run before that starts threads.

    Raises:
        SystemExit: Another process has failed.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
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


def _run(rank: int, run: Callable[[int], None]) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank)}
    run(rank)
