"""What the callback changes in a trainer before training, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from ..batch_search.settings import Settings
from ..capture.compiled_by_users import is_compiled
from ..regions.chosen_modules import submodules
from .lightning_step import LightningTrial
from .loaders import loader_batch_size
from .private_api import callbacks_of, is_initial_hparam, set_initial_hparams, takes_loader_iterator

_SHARDED = ("DeepSpeedStrategy", "FSDPStrategy", "XLAFSDPStrategy", "XLAStrategy")


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
            f"Rematerialization does not work with {strategy.__name__}, which hides or moves parameters during the "
            "step: use ModelParallelStrategy with fully_shard in configure_model, strategy='ddp' or a single device"
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
    compiled = {m: name for name, m in submodules(module) if is_compiled(m)}
    inside = {p for m in compiled for p in m.parameters()}
    if compiled and not any(p.requires_grad and p not in inside for p in module.parameters()):
        name = next(iter(compiled.values()))
        raise MisconfigurationException(
            f"{name or 'the model'} is compiled, and a compiled module cannot be taken apart: remove torch.compile"
        )


def check_searchable(trial: LightningTrial, settings: Settings) -> None:
    """Raises MisconfigurationException, with the remedy, where no batch size can be searched."""
    if not trial.has_batch_dimension:
        raise MisconfigurationException("no tensor of the batch has a batch dimension: give batch_size='keep'")
    sizes = {loader_batch_size(loader) for loader in trial.loaders}
    if len(sizes) > 1:
        raise MisconfigurationException(
            f"the training loaders have different batch sizes, {sizes}, and one cannot stand for all: "
            "give batch_size='keep'"
        )
    if trial.most_samples is None and settings.max_batch_size is None and settings.effective_batch_size is None:
        raise MisconfigurationException(
            "the training data do not say how many samples they have, so nothing but memory would limit the batch "
            "size: give max_batch_size"
        )


def move_before_tuners(trainer: Trainer, callback: Callback) -> None:
    """Puts the callback before LearningRateFinder, whose runs are to see the planned model and its batch size."""
    callbacks = callbacks_of(trainer)
    first = next((i for i, c in enumerate(callbacks) if isinstance(c, LearningRateFinder)), None)
    if first is not None and callbacks.index(callback) > first:
        others = [c for c in callbacks if c is not callback]
        # A new list: the trainer is iterating over the old one.
        cast(Any, trainer).callbacks = [*others[:first], callback, *others[first:]]


def holders_of(trainer: Trainer, name: str) -> list[Any]:
    """What holds the batch size by that name: module, datamodule, and the hyperparameters of either."""
    found: list[Any] = []
    for holder in _owners(trainer):
        if hasattr(holder, name):
            found.append(holder)
        if name in getattr(holder, "hparams", {}):
            found.append(holder.hparams)
    return found


def _owners(trainer: Trainer) -> list[Any]:
    return [h for h in (trainer.lightning_module, getattr(trainer, "datamodule", None)) if h is not None]


def set_batch_size(trainer: Trainer, batch_size: int, settings: Settings) -> Callable[[], None]:
    """Makes a batch size that of the run: attributes, hyperparameters (those that loggers record too), accumulation.

    Returns:
        What undoes it.
    """
    name = settings.batch_arg_name
    with ExitStack() as undo:
        for holder in holders_of(trainer, name):
            undo.callback(_set(holder, name, batch_size))
        for holder in _owners(trainer):
            set_initial_hparams(holder, name, batch_size)
        undo.callback(accumulate(trainer, batch_size, settings))
        return undo.pop_all().close


def log_batch_size(trainer: Trainer, batch_size: int, settings: Settings) -> None:
    """Tells the loggers, where no hyperparameter does."""
    name = settings.batch_arg_name
    if not any(is_initial_hparam(holder, name) for holder in _owners(trainer)):
        for logger in trainer.loggers:
            logger.log_hyperparams({name: batch_size})


def accumulate(trainer: Trainer, batch_size: int, settings: Settings) -> Callable[[], None]:
    """Sets how many batches make an optimizer step, where that is asked for; returns what undoes it.

    Raises:
        MisconfigurationException: The samples an optimizer step are no multiple of those a batch.
    """
    if settings.effective_batch_size is None:
        return lambda: None
    per_step = batch_size * trainer.world_size
    if settings.effective_batch_size % per_step:
        raise MisconfigurationException(
            f"effective_batch_size={settings.effective_batch_size} is no multiple of {batch_size} samples on "
            f"{trainer.world_size} devices"
        )
    return _set(trainer, "accumulate_grad_batches", settings.effective_batch_size // per_step)


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
