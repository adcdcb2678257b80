"""What holds for every test: examples that repeat, and one thread for each of several processes.

Hypothesis tries the same examples in every run, so that a commit passes or fails for good;
`pytest --hypothesis-profile=explore` looks for new ones.
"""

import logging
import os

import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("repeatable")

if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:  # the processes of `pytest -n` fill the cores
    torch.set_num_threads(1)

logging.getLogger("torch.__trace").disabled = True  # TorchDynamo's structured log, which pytest would format and keep
