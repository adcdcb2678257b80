"""Every private name of Lightning that this package touches: a Lightning release breaks one place, here.

Checked against lightning 2.6.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn


def training_loaders(trainer: Trainer) -> CombinedLoader:
    """The training loaders as the trainer's own, if it has built them, else requested afresh from their source."""
    existing = trainer.fit_loop._combined_loader
    if existing is not None:
        return existing
    loaders = _request_dataloader(trainer.fit_loop._data_source)
    return loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")


def forget_loaders(trainer: Trainer) -> None:
    """The trainer builds its loaders anew when it next needs them."""
    trainer.fit_loop._combined_loader = None
    trainer.fit_loop.epoch_loop.val_loop._combined_loader = None


def on_device(trainer: Trainer, batch: Any) -> Any:
    """The batch as `training_step` gets it: converted, transferred, with all hooks of the user."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def run_training_step(trainer: Trainer, batch: Any) -> Any:
    """The output of the user's `training_step`, called without the strategy's wrapper, so without communication."""
    module = trainer.lightning_module
    kwargs = OrderedDict[str, Any](batch=batch)
    if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
        kwargs["batch_idx"] = 0
    with trainer.precision_plugin.train_step_context():
        return module.training_step(*kwargs.values())


def takes_loader_iterator(module: LightningModule) -> bool:
    """Whether `training_step` asks for the loader's iterator in place of a batch."""
    return is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)


def run_optimization(trainer: Trainer, batch: Any, *, zero_grad: bool = True) -> Any:
    """The loss of one training step with backward and optimizer, in Lightning's order of events."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return run_training_step(trainer, batch)
    losses: list[Any] = []
    optimizer = trainer.strategy._lightning_optimizers[0]

    def closure() -> Any:
        output = run_training_step(trainer, batch)
        result = ClosureResult.from_training_step_output(output, trainer.accumulate_grad_batches)
        if zero_grad:
            module.optimizer_zero_grad(trainer.current_epoch, 0, cast(Any, optimizer))
        if result.closure_loss is None:
            return None
        trainer.strategy.backward(result.closure_loss, cast(Any, optimizer))
        losses.append(result.loss)
        return result.loss

    module.optimizer_step(trainer.current_epoch, 0, optimizer, closure)
    return losses[0] if losses else None


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The trainer's callbacks."""
    return cast(Any, trainer).callbacks


def set_callbacks(trainer: Trainer, callbacks: list[Callback]) -> None:
    """Gives the trainer another list of callbacks."""
    cast(Any, trainer).callbacks = callbacks


@contextmanager
def silent(trainer: Trainer) -> Generator[None]:
    """No logger, no callback and no `self.log` hears of what happens in the block; no rank waits for another."""
    module = trainer.lightning_module
    loggers, callbacks = trainer.loggers, callbacks_of(trainer)
    state = vars(module)
    had_log = state.get("log")
    trainer.loggers = [DummyLogger() for _ in loggers]
    set_callbacks(trainer, [])
    state["log"] = _ignore
    try:
        with _block_parallel_sync_behavior(trainer.strategy, block=True):
            yield
    finally:
        trainer.loggers = loggers
        set_callbacks(trainer, callbacks)
        if had_log is None:
            state.pop("log", None)
        else:
            state["log"] = had_log


def _ignore(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


@contextmanager
def without_optimization(trainer: Trainer) -> Generator[None]:
    """Backwards and optimizer steps that a manual `training_step` asks for do nothing in the block."""
    strategy = vars(trainer.strategy)
    before = {name: strategy[name] for name in ("backward", "optimizer_step") if name in strategy}
    strategy["backward"] = strategy["optimizer_step"] = _ignore
    try:
        yield
    finally:
        for name in ("backward", "optimizer_step"):
            strategy.pop(name, None)
        strategy.update(before)


def wrap_steps(trainer: Trainer, wrap: Callable[[Callable[[], Any], Any, bool], Any]) -> Callable[[], None]:
    """Runs every forward-and-backward of automatic optimization as `wrap(step, batch, is_accumulating)`.

    Returns:
        What undoes it.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    original = loop._make_closure

    def make_closure(kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Any:
        closure: Any = original(kwargs, optimizer, batch_idx)
        step = closure.closure
        is_accumulating = batch_idx % trainer.accumulate_grad_batches != 0
        closure.closure = lambda: wrap(step, next(iter(kwargs.values())), is_accumulating)
        return closure

    vars(loop)["_make_closure"] = make_closure

    def undo() -> None:
        vars(loop).pop("_make_closure", None)

    return undo


def logged_results(trainer: Trainer) -> list[nn.Module]:
    """The metrics in which `self.log` accumulates, as modules with their state."""
    results: Any = trainer._results
    return [] if results is None else [_Logged(results)]


class _Logged(nn.Module):
    """Holds the logged results as an attribute, whose content is recorded, and their metrics as submodules."""

    def __init__(self, results: dict[str, Any]) -> None:
        super().__init__()
        self.metrics = nn.ModuleList(v for v in results.values() if isinstance(v, nn.Module))
        vars(self)["results"] = results


def gradient_scaler(trainer: Trainer) -> Any:
    """The gradient scaler of 16-bit precision, or None."""
    return getattr(trainer.precision_plugin, "scaler", None)


def should_log(trainer: Trainer) -> bool:
    """Whether this training step is one that is logged."""
    return trainer._logger_connector.should_update_logs


def logging_step(trainer: Trainer) -> int:
    """The x-axis of the loggers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def set_initial_hparams(holder: Any, name: str, value: Any) -> bool:
    """Overwrites a hyperparameter in what the loggers will record; whether it is there."""
    initial = getattr(holder, "_hparams_initial", None)
    if initial is None or name not in initial:
        return False
    initial[name] = value
    return True


def tap_loaders(strategy: Strategy, tap: Callable[[object], object]) -> Callable[[], None]:
    """Passes every loader that the trainer prepares through `tap`; returns what undoes it."""
    original = strategy.process_dataloader

    def process_dataloader(dataloader: object) -> object:
        return tap(original(dataloader))

    strategy.process_dataloader = process_dataloader

    def undo() -> None:
        vars(strategy).pop("process_dataloader", None)

    return undo
