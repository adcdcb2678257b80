"""A Lightning training step as a `Trial`: run by hand in Lightning's order of events, everything restored."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from ..batch_search.resizing import batch_size_of, has_batch_dimension, resized
from ..batch_search.settings import Settings
from ..batch_search.trial import STEPS_PER_TRIAL
from ..measure.meter import measure_peak
from ..module_state.nesting import tensors_in
from ..module_state.preserve import preserved, preserved_random
from ..plans.step_memory import Surroundings
from ..regions.calls import View, look_through
from ..regions.footprint import alive_bytes, optimizer_footprint, optimizer_tensors, outside_bytes, storage_bytes
from .loaders import first_batch, loader_batch_size, num_samples_in
from .private_api import (
    gradient_scaler,
    on_device,
    run_optimization,
    run_training_step,
    silent,
    training_loaders,
    without_optimization,
)

T = TypeVar("T")


class LightningTrial:
    """The training step of a trainer that stands in `on_fit_start`.

    Args:
        trainer: Model on its device, optimizers configured, loaders attached.
        modules: Submodules to rewrite, or their names; None for those that the step calls.
    """

    def __init__(
        self, trainer: Trainer, modules: Sequence[Any] | None = None, effective_batch_size: int | None = None
    ) -> None:
        self.trainer, self.modules, self.effective_batch_size = trainer, modules, effective_batch_size
        self.device = trainer.strategy.root_device
        self.num_devices = trainer.world_size
        with preserved_random():
            loaders = training_loaders(trainer)
            self.batch = first_batch(loaders)
        self.loader_sizes = {loader_batch_size(loader) for loader in loaders.flattened}
        self._batch: tuple[int, Any] | None = None
        self.has_batch_dimension = has_batch_dimension(self.batch)
        self.batch_size = batch_size_of(self.batch) if self.has_batch_dimension else 1
        num_samples = num_samples_in(loaders)
        self.most_samples = None if num_samples is None else max(1, num_samples // self.num_devices)

    @classmethod
    def of_batch(cls, trainer: Trainer, batch: Any, settings: Settings) -> LightningTrial:
        """The step on one batch that is on the device already, during training."""
        trial = cls.__new__(cls)
        trial.trainer, trial.modules = trainer, settings.modules
        trial.effective_batch_size = settings.effective_batch_size
        trial.device, trial.num_devices = trainer.strategy.root_device, trainer.world_size
        trial.batch, trial.has_batch_dimension = batch, has_batch_dimension(batch)
        trial.batch_size = batch_size_of(batch) if trial.has_batch_dimension else 1
        trial._batch = trial.batch_size, batch
        trial.most_samples, trial.loader_sizes = None, set[int]()
        return trial

    def outcome(self, batch_size: int) -> dict[str, Tensor]:
        """All that a training step with optimizer produces, by name; undone afterwards."""
        module = self.trainer.lightning_module
        with self.undone():
            loss = run_optimization(self.trainer, self.batch_of(batch_size))
            found = {f"loss {i}": t.detach().clone() for i, t in enumerate(tensors_in(loss))}
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    found[f"gradient of {name}"] = parameter.grad.clone()
                found[f"parameter {name}"] = parameter.detach().clone()
            found |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
            found["random state"] = torch.get_rng_state()
            if self.device.type == "cuda":
                found["random state of the device"] = torch.cuda.get_rng_state(self.device)
        return found

    @contextmanager
    def undone(self) -> Generator[None]:
        """Nothing that the block does to module, optimizers, loggers or random states stays."""
        scaler = gradient_scaler(self.trainer)
        holders = [*self.trainer.optimizers, *([] if scaler is None else [scaler])]
        with preserved([self.trainer.lightning_module], holders), silent(self.trainer), torch.enable_grad():
            yield

    def batch_of(self, batch_size: int) -> Any:
        """The first real batch, repeated or cut to that size, on the device."""
        if self._batch is None or self._batch[0] != batch_size:
            self._batch = None  # one at a time
            batch = self.batch if batch_size == self.batch_size else resized(self.batch, batch_size)
            self._batch = batch_size, on_device(self.trainer, batch)
        return self._batch[1]

    def look_through(self, batch_size: int, modules: Sequence[Any] | None = None) -> View:
        """The calls of the modules (None: of those that the user named, or that the step calls) at that batch size."""
        with self.undone(), without_optimization(self.trainer):
            batch = self.batch_of(batch_size)
            return look_through(
                self.trainer.lightning_module,
                lambda: run_training_step(self.trainer, batch),
                self.modules if modules is None else modules,
            )

    def surroundings(self, view: View, batch_size: int) -> Surroundings:
        """What is alive beside the regions."""
        with self.undone():
            batch = self.batch_of(batch_size)
            optimizer = optimizer_footprint(
                self.trainer.lightning_module, self.trainer.strategy.optimizers, self.device
            )
        batch_bytes = storage_bytes(tensors_in(batch))
        return Surroundings(
            resident_bytes=outside_bytes(self.trainer.lightning_module, view, tensors_in(batch))
            + optimizer.state_bytes,
            optimizer_step_bytes=optimizer.step_bytes + batch_bytes,
            is_accumulating=self._num_accumulated(batch_size) > 1,
            seconds=optimizer.step_seconds / max(1, self._num_accumulated(batch_size)),
        )

    def measure(self, batch_size: int, *, with_scratch: bool) -> int:
        """The measured peak of two real steps with backward and optimizer, in bytes."""
        module, trainer = self.trainer.lightning_module, self.trainer
        peak_bytes = 0
        with self.undone():
            batch = self.batch_of(batch_size)
            for i in range(STEPS_PER_TRIAL):
                alive = [module, *optimizer_tensors(trainer.strategy.optimizers), *tensors_in(batch)]
                with measure_peak(self.device, alive, with_scratch=with_scratch) as measured:
                    run_optimization(trainer, batch, zero_grad=i == 0 or self._num_accumulated(batch_size) == 1)
                peak_bytes = max(peak_bytes, measured.peak_bytes)
        return peak_bytes

    def _num_accumulated(self, batch_size: int) -> int:
        """Batches an optimizer step."""
        if self.effective_batch_size is None:
            return self.trainer.accumulate_grad_batches
        return self.effective_batch_size // (batch_size * self.num_devices)

    def alive_bytes(self) -> int:
        """Bytes on the device before the search, which count in the budget and are not free."""
        return alive_bytes(self.trainer.lightning_module, self.device)

    def share(self, compute: Callable[[], T]) -> T:
        """What `compute` returns on rank 0, on every rank; its error likewise."""
        if self.num_devices == 1:
            return compute()
        outcome: tuple[T | None, Exception | None] = (None, None)
        if self.trainer.is_global_zero:
            try:
                outcome = compute(), None
            except Exception as error:  # raised below, on every rank
                outcome = None, error
        value, error = self.trainer.strategy.broadcast(outcome, src=0)
        if error is not None:
            raise error
        return cast(T, value)

    def least(self, value: int) -> int:
        """The least of the ranks' values."""
        if self.num_devices == 1:
            return value
        values: Any = self.trainer.strategy.all_gather(torch.tensor(value, dtype=torch.int64, device=self.device))
        return int(values.min())
