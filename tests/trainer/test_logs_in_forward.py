"""A forward that logs is divided at its logs, where it is tried as where it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from remat_runs import Classifier, Peaks, run, seeded
from torch import Tensor, nn

from lightning_remat import Rematerialization

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


class Telling(Classifier):
    """Logs after each block of its forward."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.GELU()) for _ in range(8))))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        for k, block in enumerate(self.net):
            x = block(x)
            self.log(f"mean{k}", x.detach().mean())
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return self(torch.randn(1024, 64)).square().mean()


def test_a_forward_that_logs_stays_within_the_budget(tmp_path: Path) -> None:
    log = LightningModule.log
    callback, logger = Rematerialization(memory_budget="80%", batch_size="keep", report_dir=tmp_path), Peaks()
    module = seeded(Telling)
    trainer = run(tmp_path, module, callback, logger=logger, max_steps=4)
    assert callback.result is not None
    assert callback.result.step.keys == tuple(f"net.{k}" for k in range(8))
    assert max(logger.peaks) <= callback.result.budget_bytes
    assert LightningModule.log is log
    logged = {k: v for k, v in trainer.logged_metrics.items() if k.startswith("mean")}
    plain = seeded(Telling)
    trainer = run(tmp_path, plain, max_steps=4, logger=Peaks())
    assert len(logged) == 8
    assert logged == {k: v for k, v in trainer.logged_metrics.items() if k.startswith("mean")}
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
