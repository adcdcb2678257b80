"""Lightning's BatchSizeFinder and Rematerialization side by side, under a limit that makes allocations really fail.

Each run is a process of its own on the CPU, whose address space is limited (`RLIMIT_AS`) to what it has after
building the model plus `--memory`. Counted are the real training steps of the search, its seconds on the CPU with
planning included, the batch size found, and whether training at that size survives its first steps. All runs have one
thread, and a C library that hands large blocks back to the system at once, so that the limit counts what is alive and
not what malloc hoards.

    python recipes/benchmarks/batch_size_finder.py --memory 200MiB --output recipes/results/batch_size_finder.md
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
METHODS = ("BatchSizeFinder", "BatchSizeFinder (binsearch)", "Rematerialization")
STEPS_AFTER = 3
TITLE = "Batch size search on the CPU within {memory} of address space"
COLUMNS = ("network", "method", "batch size", "real steps", "CPU seconds", "overhead", "training survives")


def build(name: str, image_size: int) -> Any:
    """A LightningModule with the network (`unet`, or `resnet` and its depth) and random images of it."""
    import torch
    from lightning.pytorch import LightningModule
    from torch.nn import functional
    from torch.utils.data import DataLoader

    from remat_recipes.networks.resnet_preact import cifar_resnet
    from remat_recipes.networks.unet import UNet

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            if name == "unet":
                self.net = UNet(3, 5, 16, 3, padded=True, batch_norm=True)
            else:
                self.net = cifar_resnet(int(name.removeprefix("resnet")), width=8)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

        def train_dataloader(self) -> Any:
            shape = (image_size, image_size)
            label = torch.zeros(shape if name == "unet" else (), dtype=torch.long)
            return DataLoader(Repeated((torch.randn(3, *shape), label)), batch_size=self.batch_size)

    class Repeated(torch.utils.data.Dataset[Any]):
        def __init__(self, sample: Any) -> None:
            self.sample = sample

        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> Any:
            return self.sample

    return Module()


def load_everything(image_size: int) -> None:
    """Starts threads, compiles kernels, loads what draws the report: the limit is on the memory of training."""
    import torch

    from lightning_remat import plan, profile, trace
    from lightning_remat.reports.plots import load_plotting

    load_plotting()

    net = torch.nn.Sequential(*(torch.nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)))
    images = torch.randn(2, 3, image_size, image_size)
    graph = profile(trace(net, images), images)
    plan(graph, plan(graph, 1 << 60, "keep_all").peak_bytes - 1, "auto")


def measure(name: str, method: str, memory_bytes: int, image_size: int, max_overhead: float) -> dict[str, Any]:
    """One search and a few steps after it, in this process."""
    import psutil
    import torch
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import BatchSizeFinder

    from lightning_remat import Rematerialization
    from lightning_remat.measure.out_of_memory import is_out_of_memory

    torch.manual_seed(0)
    module = build(name, image_size)
    found: dict[str, Any] = {"steps": 0, "seconds": 0.0, "batch_size": None, "survives": False, "overhead": 0.0}
    total_steps = [0]
    original = type(module).backward

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        total_steps[0] += 1  # a counter of the module's own would be put back after a trial
        original(self, *args, **kwargs)

    type(module).backward = counted

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                found.update(steps=total_steps[0], seconds=time.process_time() - start, batch_size=len(batch[0]))

    if method == "Rematerialization":
        finder: Any = Rematerialization(max_overhead=max_overhead, report_dir=tempfile.mkdtemp())
    else:
        finder = BatchSizeFinder(mode="binsearch" if "binsearch" in method else "power", steps_per_trial=2)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS_AFTER,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
        callbacks=[finder, Watch()],
    )
    load_everything(image_size)
    limit = psutil.Process().memory_info().vms + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    start = time.process_time()
    try:
        trainer.fit(module)
        found["survives"] = True
    except (RuntimeError, MemoryError, ValueError) as error:
        found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        if not is_out_of_memory(error) and method == "Rematerialization":
            raise
    if method == "Rematerialization" and finder.result is not None:
        result = finder.result
        plain = [c.batch_size for c in result.trials if c.plain_peak_bytes <= result.budget_bytes]
        found |= {"overhead": result.recompute_overhead, "plain_batch_size": max(plain, default=0)}
    return found


def main() -> None:
    """Runs every method on both networks and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the table there too, as Markdown")
    parser.add_argument("--memory", default="200MiB", help="address space beyond that of the model")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--max-overhead", type=float, default=0.35)
    parser.add_argument("--networks", nargs="+", default=["resnet20", "unet"])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--one", nargs=2, metavar=("NETWORK", "METHOD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    from lightning_remat.budget import parse_budget

    memory_bytes = parse_budget(arguments.memory, plain_peak_bytes=0, device_bytes=0)
    if arguments.one:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        outcome = measure(*arguments.one, memory_bytes, arguments.image_size, arguments.max_overhead)
        print("RESULT " + json.dumps(outcome))
        return
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    runs = [(network, method) for network in arguments.networks for method in METHODS]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for (network, method), row in zip(runs, pool.map(lambda run: run_apart(*run), runs), strict=True):
            survives = "yes" if row["survives"] else f"no: {row.get('error', 'the process died')}"
            figures = (row["batch_size"], row["steps"], f"{row['seconds']:.1f}", f"{row['overhead']:.1%}", survives)
            lines.append("| " + " | ".join(map(str, (network, method, *figures))) + " |")
            print(lines[-1], flush=True)
    text = "\n".join([f"# {TITLE.format(memory=arguments.memory)}", "", *lines, "", "Made by", "", *_command(), ""])
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)


def _command() -> list[str]:
    return [f"    python recipes/benchmarks/{Path(__file__).name} {' '.join(sys.argv[1:])}"]


def run_apart(network: str, method: str) -> dict[str, Any]:
    """The outcome of one run in a process of its own."""
    root = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join([str(root), str(root.parent)])
    command = [sys.executable, __file__, *sys.argv[1:], "--one", network, method]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    error = f"the process ended with code {done.returncode}"
    return {"steps": "?", "seconds": 0.0, "batch_size": None, "survives": False, "overhead": 0.0, "error": error}


if __name__ == "__main__":
    main()
