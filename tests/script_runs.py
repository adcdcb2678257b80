"""Scripts of the tests that run in processes of their own."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, (FOLDER, FOLDER.parent, FOLDER.parent / "recipes"))),
    "OMP_NUM_THREADS": "1",
}
"""Of such a process: it imports what pytest lets the tests import, and takes one thread."""

MAPPED_APART = {**ENVIRONMENT, "MALLOC_MMAP_THRESHOLD_": "16384"}
"""Where its memory is measured: a toy's tensors lie in the C library's heap, whose gaps are as large as the toy; mapped
apart, they leave none."""
