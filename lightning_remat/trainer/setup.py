"""What the callback changes in a trainer before training, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from ..batch_search.settings import Settings
from ..module_state.preserve import preserved_random
from ..regions.calls import submodules
from .loaders import loader_batch_size, rebatched
from .private_api import callbacks_of, forget_loaders, set_callbacks, set_initial_hparams, takes_loader_iterator

_SHARDED = ("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy", "XLAFSDPStrategy", "XLAStrategy")


def check_supported(trainer: Trainer, module: LightningModule, callback: Callback) -> None:
    """Raises MisconfigurationException, with the remedy, where the callback cannot work."""
    for other in callbacks_of(trainer):
        if isinstance(other, BatchSizeFinder):
            raise MisconfigurationException(
                "Rematerialization searches the batch size itself, with less memory a sample: remove BatchSizeFinder"
            )
        if type(other) is type(callback) and other is not callback:
            raise MisconfigurationException("the trainer has two Rematerialization callbacks: remove one")
    strategy = type(trainer.strategy)
    if any(base.__name__ in _SHARDED for base in strategy.__mro__):
        raise MisconfigurationException(
            f"Rematerialization does not work with {strategy.__name__}, which shards or moves parameters during the "
            "step: use strategy='ddp' or a single device"
        )
    if takes_loader_iterator(module):
        raise MisconfigurationException(
            "training_step(dataloader_iter) takes the loader's iterator, so no batch is known before it runs: take "
            "`batch` instead"
        )
    for name, submodule in submodules(module):
        if isinstance(submodule, CheckpointWrapper):
            raise MisconfigurationException(
                f"{name} is wrapped by torch's activation checkpointing, which Rematerialization replaces: remove the "
                "wrapper"
            )
        if isinstance(submodule, OptimizedModule):
            raise MisconfigurationException(
                f"{name or 'the model'} is compiled, and a compiled module cannot be taken apart: remove torch.compile"
            )


def move_before_tuners(trainer: Trainer, callback: Callback) -> None:
    """Puts the callback before LearningRateFinder, whose runs are to see the planned model and its batch size."""
    callbacks = callbacks_of(trainer)
    first = next((i for i, c in enumerate(callbacks) if isinstance(c, LearningRateFinder)), None)
    if first is not None and callbacks.index(callback) > first:
        others = [c for c in callbacks if c is not callback]
        # A new list: the trainer is iterating over the old one.
        set_callbacks(trainer, [*others[:first], callback, *others[first:]])


def tap(trainer: Trainer, loader: object, batch_size: int | None, settings: Settings) -> object:
    """The loader with the batch size found, where it does not have it already."""
    if batch_size is None or not (trainer.training or settings.include_validation):
        return loader
    present = loader_batch_size(loader)
    if present == batch_size:
        return loader
    if trainer.training and _holders(trainer, settings.batch_arg_name):
        rank_zero_warn(
            f"the training loader ignores the attribute {settings.batch_arg_name!r} and yields batches of {present}: "
            f"Rematerialization has replaced its batch sampler by one of {batch_size}"
        )
    return rebatched(loader, batch_size, settings.rebatch_fn)


def _holders(trainer: Trainer, name: str) -> list[Any]:
    """What holds the batch size by that name: module, datamodule, and the hyperparameters of either."""
    found: list[Any] = []
    for holder in cast(list[Any], [trainer.lightning_module, getattr(trainer, "datamodule", None)]):
        if holder is None:
            continue
        if hasattr(holder, name):
            found.append(holder)
        if name in getattr(holder, "hparams", {}):
            found.append(holder.hparams)
    return found


def apply_batch_size(trainer: Trainer, batch_size: int, settings: Settings) -> None:
    """Makes the batch size found that of the run; on an error everything is as before.

    Attributes, hyperparameters (those that loggers record too) and accumulation are set, loaders are built anew when
    next needed, and optimizers and schedulers are configured again, for they may count the batches of an epoch.
    """
    name = settings.batch_arg_name
    undo: list[Callable[[], None]] = []
    try:
        undo.extend(_set(holder, name, batch_size) for holder in _holders(trainer, name))
        is_logged = False
        for holder in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
            if holder is not None:
                is_logged |= set_initial_hparams(holder, name, batch_size)
        if settings.effective_batch_size is not None:
            per_step = batch_size * trainer.world_size
            if settings.effective_batch_size % per_step:
                raise MisconfigurationException(
                    f"effective_batch_size={settings.effective_batch_size} is no multiple of {batch_size} samples on "
                    f"{trainer.world_size} devices"
                )
            undo.append(_set(trainer, "accumulate_grad_batches", settings.effective_batch_size // per_step))
        forget_loaders(trainer)
        with preserved_random():
            trainer.strategy.setup_optimizers(trainer)
        if not is_logged:
            for logger in trainer.loggers:
                logger.log_hyperparams({name: batch_size})
    except BaseException:
        for put_back in reversed(undo):
            put_back()
        raise


def _set(holder: Any, name: str, value: object) -> Callable[[], None]:
    is_mapping = issubclass(type(holder), dict)
    before: object = holder[name] if is_mapping else getattr(holder, name)

    def write(what: object) -> None:
        if is_mapping:
            holder[name] = what
        else:
            setattr(holder, name, what)

    write(value)
    return lambda: write(before)
