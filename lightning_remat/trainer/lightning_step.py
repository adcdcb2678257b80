"""A Lightning training step as a `Trial`: run by hand in Lightning's order of events, everything restored."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from ..batch_search.resizing import batch_size_of, has_batch_dimension
from ..batch_search.settings import Settings
from ..batch_search.trial import STEPS_PER_TRIAL
from ..batch_search.tried_batch import TriedBatch
from ..devices import counts_memory, empty_cache
from ..execution.modified import ModifiedError, retried
from ..measure.allocated_growth import Peak
from ..measure.bandwidth import Bandwidth, bandwidth_of
from ..measure.device_memory import enforced
from ..measure.meter import measure_peak
from ..measure.out_of_memory import is_out_of_memory, is_too_small_for_batch_norm
from ..measure.tensor_bytes import storage_bytes
from ..module_state.agreement import together
from ..module_state.batches import tensors_held
from ..module_state.preserve import preserved
from ..module_state.sharding import settle, settled
from ..plans.step_memory import Surroundings
from ..regions.calls import View
from ..regions.footprint import (
    OptimizerFootprint,
    alive_bytes,
    held_tensors,
    optimizer_footprint,
    optimizer_tensors,
    outside_bytes,
)
from ..regions.gathering import gathering_of
from ..regions.handed_on import handed_on
from ..regions.look_through import look_through
from ..regions.phases import Backwards
from . import ranks
from .buckets import buckets_of
from .loaders import common_batch_size, keeps_last_batch, largest_batch, samples_drawn
from .private_api import (
    callbacks_of,
    forward_and_backward,
    on_device,
    run_optimization,
    run_training_step,
    silent,
    state_holders,
    training_loaders,
    without_optimization,
)
from .reducer import forget_backwards
from .validation import Validation

T = TypeVar("T")
logger = logging.getLogger(__name__)


class StepFailedError(Exception):
    """A training step raised while it was tried: the user's error, or something that cannot be tried beforehand."""


def _is_of_the_size(error: BaseException) -> bool:
    """Whether another batch size may do without it."""
    return is_out_of_memory(error) or is_too_small_for_batch_norm(error)


@contextmanager
def _told_apart(is_told_elsewhere: Callable[[BaseException], bool] = _is_of_the_size) -> Generator[None]:
    """What the user's step raises, from what this package does and what is of the size that was tried."""
    try:
        yield
    except Exception as error:
        if is_told_elsewhere(error):
            raise
        raise StepFailedError(f"{type(error).__name__}: {error}") from error


def _is_told_elsewhere(error: BaseException) -> bool:
    """Whether it is of the size that was tried, or another run of the step may do without it."""
    return _is_of_the_size(error) or isinstance(error, ModifiedError)


class LightningTrial:
    """The training step of a trainer, where it is about to be run.

    Args:
        trainer: The hooks that come before the step have been called.
        settings: Of the callback.
        batch: What is trained on next.
        batch_idx: Its place in the epoch.
        is_on_device: Whether the batch has been through Lightning's hooks of transfer.
        with_optimizer: Whether steps are tried with the optimizer's, or without, which leaves less to be undone.
        loaders: Those that training has; where other batch sizes are in question.

    Attributes:
        batch_size: Samples in the batch; with several devices, in that of the rank that has most to do, which plans.
        differentiates: Whether the step was seen to ask for derivatives of its own.
        validation: The validation step that is tried between training steps; None for none.
        within: See `Trial`.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: Settings,
        batch: Any,
        batch_idx: int = 0,
        *,
        is_on_device: bool = True,
        with_optimizer: bool = True,
        loaders: Sequence[Any] = (),
    ) -> None:
        self.trainer, self.modules = trainer, settings.modules
        self.module: nn.Module = trainer.lightning_module
        self.effective_batch_size = settings.effective_batch_size
        self.gather_bandwidth: Bandwidth | None = settings.gather_bandwidth
        self.batch_idx, self.is_on_device = batch_idx, is_on_device
        self.with_optimizer, self.loaders = with_optimizer, loaders
        self.device = trainer.strategy.root_device
        self.num_devices = trainer.world_size
        self.has_batch_dimension = has_batch_dimension(batch)
        self._told = common_batch_size(loaders or training_loaders(trainer))
        own_size = batch_size_of(batch, self._told) if self.has_batch_dimension else 1
        elements = ranks.gathered(trainer, sum(t.numel() for t in tensors_held(batch)))
        self._planning_rank = elements.index(max(elements))
        self.batch_size = ranks.gathered(trainer, own_size)[self._planning_rank]
        # Ranks with samplers of their own may draw fewer samples than others.
        least = [ranks.least(trainer, samples_drawn(loader) or 0) or None for loader in loaders]
        self._drawn = list(zip(least, map(keeps_last_batch, loaders), strict=True))
        self.most_samples = most = largest_batch(self._drawn)
        if most is not None and isinstance(part := trainer.limit_train_batches, float):
            self.most_samples = max(1, most // math.ceil(1 / part))  # so that one batch of an epoch is trained
        self.differentiates = False
        self.validation: Validation | None = None
        self.within: int | None = None
        self._batch = TriedBatch(
            batch, self.batch_size, self._told, None if is_on_device else partial(on_device, trainer)
        )

    @contextmanager
    def undone(self) -> Generator[None]:
        """Nothing that the block does to module, trainer, optimizers, loggers, batch or random states stays."""
        trainer, module = self.trainer, self.module
        settle(module)  # before it is recorded
        with preserved([module], state_holders(trainer)), silent(trainer), settled(module), torch.enable_grad():
            try:
                yield
            finally:
                self._batch.put_back()

    def batch_of(self, batch_size: int) -> Any:
        """The batch as it is for that of the trial, else repeated or cut to that size, on the device."""
        return self._batch.of(batch_size)

    def close(self) -> None:
        """Lets go of the batches: what still refers to the trial must not hold them while training runs.

        DDP forgets what it was told of the trial's backwards, unless gradients of the batch before are to be added to.
        """
        self.validation = None
        self._batch.close()
        is_first = self.batch_idx % self.trainer.accumulate_grad_batches == 0
        if is_first or all(parameter.grad is None for parameter in self.module.parameters()):
            forget_backwards(self.trainer)
        empty_cache(self.device)

    def look_through(self, batch_size: int, modules: Sequence[Any] | None = None) -> View:
        """The calls of the modules (None: of those that the user named, or that the step calls) at that batch size.

        First without anything saved for a backward, so that a step that does not fit can be looked through; a step
        that differentiates by itself fails at that, and is run again with all that it saves.

        Raises:
            StepFailedError: The step raises.
        """
        trainer, index, backwards = self.trainer, self.batch_idx, Backwards()

        @contextmanager
        def prepared() -> Generator[None]:
            with self.undone():
                self.batch_of(batch_size)
                yield

        def step() -> object:
            with without_optimization(trainer, backwards.asked), _told_apart():
                return run_training_step(trainer, self.batch_of(batch_size), index)

        def differentiating() -> None:
            with _told_apart():
                forward_and_backward(trainer, self.batch_of(batch_size), index)

        view = look_through(
            self.module,
            step,
            self.modules if modules is None else modules,
            may_nest=modules is not None,
            undone=prepared,
            differentiating=differentiating,
            again_after=(StepFailedError,),
            is_known_to_differentiate=self.differentiates,
            backwards=backwards,
            agree=lambda value: max(ranks.gathered(trainer, value)),
        )
        self.differentiates = view.differentiates
        return view

    def surroundings(self, view: View, batch_size: int) -> Surroundings:
        """What is alive beside the regions."""
        with self.undone():
            batch = tensors_held(self.batch_of(batch_size))
            optimizer = self._optimizer()
        self.gather_bandwidth = bandwidth_of(self.module, self.gather_bandwidth)  # measured once
        outside, buckets = outside_bytes(self.module, view, batch), buckets_of(self.trainer)
        return Surroundings(
            resident_bytes=outside + optimizer.state_bytes + buckets.copy_bytes,
            optimizer_step_bytes=optimizer.step_bytes + storage_bytes(batch) + buckets.copy_bytes,
            is_accumulating=buckets.hold_gradients or self._num_accumulated(batch_size) > 1,
            gathering=gathering_of(view, self.gather_bandwidth),
            order=view.order,
            over=view.over,
            handed_on=handed_on(self.module, view, batch),
            seconds=optimizer.step_seconds / max(1, self._num_accumulated(batch_size)),
        )

    def _optimizer(self) -> OptimizerFootprint:
        """What the optimizers cost; makes their states.

        An optimizer that makes no step of a gradient of zero has to be tried with the step's own.
        """
        optimizers = self.trainer.strategy.optimizers
        try:
            return optimizer_footprint(self.module, optimizers, self.device)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            logger.info("the optimizers are measured in whole steps, as on gradients of zero they raise %r", error)
            self.with_optimizer = True
            owned = storage_bytes([*self.module.parameters(), *self.module.buffers()])
            return OptimizerFootprint(storage_bytes(optimizer_tensors(optimizers)), owned, 0.0)

    def measure(self, batch_size: int, *, with_scratch: bool) -> int:
        """The measured peak of two real steps, in bytes, and of a validation step between them where that counts.

        Without the optimizer these are forward and backward beside the optimizer's state, and its step on gradients of
        zero.

        Raises:
            StepFailedError: The step raises, for another reason than a lack of memory or of samples.
        """
        step = partial(self._tried, batch_size, with_scratch)
        with _told_apart(lambda error: not isinstance(error, ModifiedError)):
            return retried(lambda: together(self.module, step, is_out_of_memory))

    def _tried(self, batch_size: int, with_scratch: bool) -> int:
        with self.undone():
            self._batch.forget()
            empty_cache(self.device)
            held = storage_bytes(self._held(self.batch_of(batch_size)))
            limited = nullcontext() if self.within is None else enforced(self.device, self.within, held)
            with _told_apart(_is_told_elsewhere), limited:
                return self._measured(batch_size, with_scratch)

    def _measured(self, batch_size: int, with_scratch: bool) -> int:
        peak_bytes, batch = 0, None
        if not self.with_optimizer:
            peak_bytes = self._optimizer().step_bytes + storage_bytes(tensors_held(self.batch_of(batch_size)))
            for parameter in self.module.parameters():
                parameter.grad = None
        for i in range(STEPS_PER_TRIAL):
            if i and not self.is_on_device:
                batch = None
                self._batch.forget()  # training brings every batch anew, to where memory is free then
                if self.validation is not None:
                    with self._metered([], with_scratch) as measured:
                        self.validation.run(self.trainer, batch_size)
                    peak_bytes = max(peak_bytes, measured.peak_bytes)
            batch = self.batch_of(batch_size)
            zero_grad = i == 0 or self._num_accumulated(batch_size) == 1
            with self._metered(batch, with_scratch) as measured:
                run_optimization(
                    self.trainer, batch, self.batch_idx, zero_grad=zero_grad, with_optimizer=self.with_optimizer
                )
            peak_bytes = max(peak_bytes, measured.peak_bytes)
        return peak_bytes + self._unseen_bytes()

    def _metered(self, batch: Any, with_scratch: bool) -> AbstractContextManager[Peak]:
        alive = [*optimizer_tensors(self.trainer.strategy.optimizers), *tensors_held(batch)]
        return measure_peak(self.device, [self.module, *alive], with_scratch=with_scratch)

    def _held(self, batch: Any) -> list[Tensor]:
        return held_tensors(self.module, self.trainer.strategy.optimizers, batch)

    def _unseen_bytes(self) -> int:
        """The buckets of DDP, of which no operation tells; an allocator counts them."""
        return 0 if counts_memory(self.device) else buckets_of(self.trainer).num_bytes

    def _num_accumulated(self, batch_size: int) -> int:
        """Most batches an optimizer step."""
        if self.effective_batch_size is not None:
            return self.effective_batch_size // (batch_size * self.num_devices)
        schedules = [c.scheduling for c in callbacks_of(self.trainer) if isinstance(c, GradientAccumulationScheduler)]
        return max(self.trainer.accumulate_grad_batches, *(n for s in schedules for n in s.values()), 1)

    def alive_bytes(self) -> int:
        """Bytes on the device before the search, which count in the budget and are not free."""
        return alive_bytes(self.device, self._held(self._batch.given)) + self._unseen_bytes()

    def leaves_one_sample(self, batch_size: int) -> bool:
        """Whether an epoch of such batches ends with a single sample, which a batch norm cannot be trained on."""
        if batch_size == 1 or not any(isinstance(m, _BatchNorm) for m in self.module.modules()):
            return False
        return any(count is not None and is_kept and count % batch_size == 1 for count, is_kept in self._drawn)

    def share(self, compute: Callable[[], T]) -> T:
        """What `compute` returns on the rank that plans, on every rank; its error likewise."""
        return ranks.share(self.trainer, compute, self._planning_rank)

    def least(self, value: int) -> int:
        """The least of the ranks' values."""
        return ranks.least(self.trainer, value)
