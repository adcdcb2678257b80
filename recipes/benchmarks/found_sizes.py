"""Whether sizes that a search finds train to the end under a hard limit, and how much larger ones would.

Each run is a process of its own: `Rematerialization()` searches a batch size for what the device has, then trains three
epochs with validation, a checkpoint an epoch, a logger, and a smaller last batch in each epoch. The limit is on CUDA
the fraction that the process may take, on the CPU the address space beyond what the process has after building it
(`RLIMIT_AS`). On the device of the tests, whose allocator follows the rules of CUDA's and whose kernels are the CPU's,
limit and segments are a sixteenth of what the table says.

Beside it the size that is 10 % larger is trained in the same way by the plan with the lowest peak of all
(`on_infeasible="minimum"`, whatever is predicted): where that runs out of memory, nothing 10 % larger trains.

    python recipes/benchmarks/found_sizes.py --device ledger --output recipes/results/found_sizes.md
    python recipes/benchmarks/found_sizes.py --device cpu --limits 300 400 --networks resnet20 unet
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[:0] = [str(Path(__file__).resolve().parents[k]) for k in (1, 2)]
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))  # with the device of the tests

from benchmarks.batch_size_finder import ENVIRONMENT, load_everything

NETWORKS = ("resnet20", "unet", "densenet", "vit", "gpt")
LIMITS = {"cpu": (300, 400, 500, 600), "ledger": (384, 512, 640, 768), "cuda": (2048, 4096, 8192, 16384)}
EPOCHS, BATCHES, LAST_PART = 3, 2, 0.6
IMAGE_SIZE = 16
SHRUNK = 16
MIB = 2**20
HEADS = ("network", "limit", "batch size", "plain", "overhead", "trains to the end", "peak", "10 % larger", "search")


def build(name: str) -> Any:
    """A LightningModule with the network, and data on which memory is the limit."""
    import torch
    from lightning.pytorch import LightningModule
    from torch import Tensor, nn
    from torch.nn import functional
    from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler
    from torchvision.models import DenseNet, VisionTransformer

    from remat_recipes.networks.gpt import GPT
    from remat_recipes.networks.resnet_preact import cifar_resnet
    from remat_recipes.networks.unet import UNet

    networks: dict[str, Any] = {
        "resnet20": lambda: cifar_resnet(20, width=8),
        "unet": lambda: UNet(3, 10, 16, 3, padded=True, batch_norm=True),
        "densenet": lambda: DenseNet(8, (4, 4, 4), 16, num_classes=10),
        "vit": lambda: VisionTransformer(IMAGE_SIZE, 4, 4, 4, 64, 128, num_classes=10),
        "gpt": lambda: GPT(64, 64, 4, 4, 64),
    }

    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, index: int) -> Any:
            generator = torch.Generator().manual_seed(index)
            if name == "gpt":
                words = torch.randint(64, (33,), generator=generator)
                return words[:-1], words[1:]
            label = torch.zeros((IMAGE_SIZE,) * 2 if name == "unet" else (), dtype=torch.long)
            return torch.randn(3, IMAGE_SIZE, IMAGE_SIZE, generator=generator), label

    class Epoch(BatchSampler):
        """A few batches and a smaller one, however large they are."""

        def __init__(self, batch_size: int) -> None:
            super().__init__(SequentialSampler(range(1 << 20)), batch_size, drop_last=False)

        def __iter__(self) -> Iterator[list[int]]:
            for n in range(BATCHES):
                yield list(range(n * self.batch_size, (n + 1) * self.batch_size))
            yield list(range(max(2, int(LAST_PART * self.batch_size))))

        def __len__(self) -> int:
            return BATCHES + 1

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 4
            self.net: nn.Module = networks[name]()

        def loss_of(self, batch: Any) -> Tensor:
            scores, labels = self.net(batch[0]), batch[1]
            if name == "gpt":
                scores = scores.transpose(1, 2)
            return functional.cross_entropy(scores, labels)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss_of(batch)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss_of(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def loader(self) -> Any:
            return DataLoader(Samples(), batch_sampler=Epoch(self.batch_size))

        def train_dataloader(self) -> Any:
            return self.loader()

        def val_dataloader(self) -> Any:
            return self.loader()

    return Module()


def limit_memory(kind: str, limit_bytes: int) -> None:
    """From here on the device, or the process on the CPU, gets no more than that."""
    import torch

    if kind == "ledger":
        from accelerator import ledger

        ledger.set_limit(limit_bytes // SHRUNK)
    elif kind == "cpu":
        import psutil

        limit_bytes += psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    else:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total)


def trainer_options(kind: str) -> dict[str, Any]:
    """Where it trains."""
    import torch

    if kind == "ledger":
        from accelerator.lightning_device import on_device

        return on_device(torch.device("ledger", 0))
    return {"accelerator": "cpu" if kind == "cpu" else "gpu", "devices": 1}


def measure(name: str, kind: str, limit_bytes: int, size: int | None, planner: str) -> dict[str, Any]:
    """One run in this process; at a given size by the lowest plan."""
    import torch
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from lightning_remat import InfeasibleBudgetError, Rematerialization
    from lightning_remat.devices import counts_memory, most_bytes
    from lightning_remat.measure.out_of_memory import is_out_of_memory

    folder = tempfile.mkdtemp()
    torch.manual_seed(0)
    module = build(name)
    if size is None:
        remat = Rematerialization(planner, max_batch_size=1 << 16)
    else:
        remat = Rematerialization(planner, batch_size=size, memory_budget=1, on_infeasible="minimum")
    found: dict[str, Any] = {"survives": False}
    start = time.perf_counter()

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                found["search_seconds"] = time.perf_counter() - start

    trainer = Trainer(
        max_epochs=EPOCHS,
        default_root_dir=folder,
        callbacks=[remat, ModelCheckpoint(folder), Watch()],
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_options(kind),
    )
    if kind == "cpu":
        load_everything(IMAGE_SIZE)
    limit_memory(kind, limit_bytes)
    try:
        trainer.fit(module)
        found["survives"] = trainer.global_step == EPOCHS * (BATCHES + 1)
    except (RuntimeError, MemoryError, InfeasibleBudgetError) as error:
        found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}, step {trainer.global_step}"
        if not is_out_of_memory(error) and not isinstance(error, InfeasibleBudgetError):
            raise
    device = trainer.strategy.root_device
    if counts_memory(device):
        found["peak_bytes"] = most_bytes(device, reserved=True)
    if (result := remat.result) is not None:
        plain = [c.batch_size for c in result.trials if c.plain_peak_bytes <= result.budget_bytes]
        found |= {"batch_size": result.batch_size, "overhead": result.recompute_overhead}
        found |= {"plain": max(plain, default=0), "measured": result.measured_peak_bytes}
    return found


def run_apart(name: str, kind: str, limit: int, size: int | None, planner: str) -> dict[str, Any]:
    """The outcome of one run in a process of its own: a fork of this one, a new one on the CPU, which starts small."""
    if kind != "cpu":
        receiver, sender = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_send, args=(sender, name, kind, limit * MIB, size, planner))
        process.start()
        sender.close()
        try:
            return receiver.recv()
        except EOFError:
            process.join()
            return {"survives": False, "error": f"the process ended with code {process.exitcode}"}
    own = [] if size is None else ["--size", str(size)]
    command = [sys.executable, __file__, *sys.argv[1:], "--one", name, str(limit), *own]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return {"survives": False, "error": f"the process ended with code {done.returncode}"}


def _send(sender: Connection, *run: Any) -> None:
    sender.send(measure(*run))


def prepare(kind: str) -> None:
    """What is the same in all runs, before any of them; the processes of runs are forks of this one."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if kind == "ledger":
        from accelerator import ledger

        from lightning_remat.plans import caching_allocator

        ledger.load()
        ledger.shrink(SHRUNK)
        caching_allocator.SIZES = caching_allocator.Sizes(*(size // SHRUNK for size in caching_allocator.SIZES))


def row(name: str, kind: str, limit: int, planner: str) -> tuple[str, ...]:
    """A line of the table: the size that is found, and one that is 10 % larger."""
    found = run_apart(name, kind, limit, None, planner)
    outcome = "yes" if found["survives"] else f"no: {found.get('error', 'steps are missing')}"
    if "batch_size" not in found:
        return (name, f"{limit} MiB", "", "", "", outcome, "", "", "")
    larger = math.ceil(1.1 * found["batch_size"])
    other = run_apart(name, kind, limit, larger, planner)
    unit = MIB / (SHRUNK if kind == "ledger" else 1)
    peak = "" if "peak_bytes" not in found else f"{found['peak_bytes'] / unit:.0f} MiB"
    return (
        name,
        f"{limit} MiB",
        str(found["batch_size"]),
        str(found["plain"]),
        f"{found['overhead']:.1%}",
        outcome,
        peak,
        f"{larger}: {'trains' if other['survives'] else other['error'].split(':')[0]}",
        f"{found.get('search_seconds', math.nan):.0f} s",
    )


def main() -> None:
    """Runs everything and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(LIMITS), default="ledger")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--limits", nargs="+", type=int, help="in MiB")
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, help="write the table there too, as Markdown")
    parser.add_argument("--one", nargs=2, metavar=("NETWORK", "LIMIT"), help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    kind = arguments.device
    prepare(kind)
    if arguments.one:
        name, limit = arguments.one
        print("RESULT " + json.dumps(measure(name, kind, int(limit) * MIB, arguments.size, arguments.planner)))
        return
    import torch

    limits, planner = arguments.limits or LIMITS[kind], arguments.planner
    runs = [(name, kind, limit, planner) for name in arguments.networks for limit in limits]
    lines = ["| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for cells in pool.map(lambda run: row(*run), runs):
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    device = torch.cuda.get_device_name() if kind == "cuda" else platform.machine()
    where = {"ledger": "the device of the tests", "cpu": "the CPU"}.get(kind, device)
    command = f"    python recipes/benchmarks/{Path(__file__).name} {' '.join(sys.argv[1:])}"
    title = f"# Sizes that were found on {where}, trained for {EPOCHS} epochs with validation and checkpoints"
    text = "\n".join([title, "", *lines, "", f"Made with torch {torch.__version__} by", "", command, ""])
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
