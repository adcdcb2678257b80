"""Processes of one group, forked from one: to import all anew in each takes longer than most of what they do."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable


def run_ranks(num_ranks: int, run: Callable[[int], None]) -> None:
    """Calls `run` with each rank, each in a process of its own, the first in this one.

    The environment is that of processes which a launcher has started, as Lightning and PyTorch expect it. Nothing may
    have run before that starts threads.

    Raises:
        SystemExit: Another process has failed, after the first is done.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    others = list[int]()
    for rank in range(1, num_ranks):
        if (process := os.fork()) == 0:
            os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank)}
            run(rank)
            sys.exit()
        others.append(process)
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0"}
    try:
        run(0)
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in others]
    if any(codes):
        sys.exit(f"exit codes of the other processes: {codes}")
