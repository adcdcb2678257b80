"""What it costs that the callback compares steps with plain ones before it trains, beside what planning costs.

python recipes/benchmarks/self_check_cost.py

The training job of the README, a ResNet18 on images of 32 x 32 and a small GPT are begun as a Trainer begins them.
Seconds of the wall clock and of this process's processors, medians of runs; writes
recipes/results/self_check_cost.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torchvision
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_remat import Rematerialization
from lightning_remat.trainer import callback

RECIPES = Path(__file__).parent.parent
RESULTS = RECIPES / "results" / "self_check_cost.md"
sys.path.insert(0, str(RECIPES))
from networks.gpt import GPT  # noqa: E402


class Job(LightningModule):
    """A network that classifies, trained with AdamW."""

    def __init__(self, network: nn.Module, inputs: Tensor, num_classes: int, batch_size: int) -> None:
        super().__init__()
        self.network, self.inputs, self.num_classes, self.size = network, inputs, num_classes, batch_size

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        logits = self.network(batch[0]).flatten(0, -2)
        return functional.cross_entropy(logits, batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        places = self.inputs.shape if self.inputs.dim() == 2 else self.inputs.shape[:1]
        return DataLoader(TensorDataset(self.inputs, torch.randint(0, self.num_classes, places)), self.size)


Made = tuple[LightningModule, LightningDataModule | None]


def readme_job() -> Made:
    with initialize_config_dir(str(RECIPES.parent / "conf"), version_base="1.3"):
        config = compose("train")
    return instantiate(config.module, _convert_="all"), instantiate(config.data, _convert_="all")


def resnet18() -> Made:
    network = torchvision.models.resnet18(num_classes=10)
    return Job(network, torch.randn(128, 3, 32, 32), 10, 128), None


def small_gpt() -> Made:
    network = GPT(vocabulary_size=256, width=128, num_blocks=4, num_heads=4, num_positions=128)
    return Job(network, torch.randint(0, 256, (32, 128)), 256, 32), None


JOBS: dict[str, tuple[Callable[[], Made], str]] = {
    "the README's training job": (readme_job, "50%"),
    "ResNet18, 128 images of 32 x 32": (resnet18, "92%"),
    "GPT of 4 blocks of width 128, 32 x 128 tokens": (small_gpt, "50%"),
}
"""How each is made, and its budget: the weights of a ResNet18 take most of its peak."""


@dataclass
class Clock:
    """Seconds in a function: of the wall clock and of this process's processors."""

    wall: float = 0.0
    processor: float = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            wall, processor = time.perf_counter(), time.process_time()
            try:
                return function(*args)
            finally:
                self.wall += time.perf_counter() - wall
                self.processor += time.process_time() - processor

        return timed


def begun(make: Callable[[], Made], budget: str) -> tuple[Clock, Clock]:
    """What planning and comparing take of the first step of a job.

    Raises:
        RuntimeError: It was not trained by a plan.
    """
    seed_everything(0, verbose=False)
    module, data = make()
    ours = Rematerialization(memory_budget=budget, batch_size="keep")
    trainer = Trainer(
        accelerator="cpu",
        max_steps=1,
        limit_val_batches=0,
        callbacks=[ours],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    planning, checking = Clock(), Clock()
    with (
        patch.object(callback, "planned", planning.around(callback.planned)),
        patch.object(callback, "passes_check", checking.around(callback.passes_check)),
    ):
        trainer.fit(module, datamodule=data)
    if ours.result is None or not ours.result.step.num_recomputed:
        raise RuntimeError(f"{type(module).__name__} was trained without recomputation")
    return planning, checking


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    warnings.simplefilter("ignore")
    lines = [
        "# What it costs to compare steps with plain ones first",
        "",
        f"Written by `python recipes/benchmarks/self_check_cost.py` (torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s) of a CPU): medians of {runs} runs, in seconds.",
        "",
        "| job | planning | comparing | of the processors: planning | comparing | part of planning |",
        "|---|---|---|---|---|---|",
    ]
    for name, (make, budget) in JOBS.items():
        found = [begun(make, budget) for _ in range(runs)]
        columns = [[p.wall for p, _ in found], [c.wall for _, c in found]]
        columns += [[p.processor for p, _ in found], [c.processor for _, c in found]]
        planning, checking, busy_planning, busy_checking = map(statistics.median, columns)
        lines.append(
            f"| {name}, {budget} | {planning:.2f} | {checking:.2f} | {busy_planning:.2f} | {busy_checking:.2f} | "
            f"{busy_checking / busy_planning:.0%} |"
        )
        print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
