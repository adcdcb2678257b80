"""Every private name of Lightning that this package calls or replaces: a Lightning release breaks one place, here.

Checked against lightning 2.6.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import is_dataclass
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from .logs_in_forward import ignore_log

Undo = Callable[[], object]


def build_loaders(trainer: Trainer) -> CombinedLoader | None:
    """The training loaders, built by Lightning as it does for training; None where there is nothing to train on."""
    trainer.fit_loop.setup_data()
    return built_loaders(trainer)


def built_loaders(trainer: Trainer) -> CombinedLoader | None:
    """The training loaders, if they are built."""
    return trainer.fit_loop._combined_loader


def training_loaders(trainer: Trainer) -> list[Any]:
    """The training loaders one by one."""
    loaders = built_loaders(trainer)
    return [] if loaders is None else list(loaders.flattened)


def next_batch(trainer: Trainer) -> Any:
    """The next batch of the loaders that are built; None where there is no more."""
    batch = None
    with suppress(StopIteration):
        while batch is None:
            batch = next(cast(Any, trainer.fit_loop._data_fetcher))[0]
    return batch


def forget_loaders(trainer: Trainer) -> None:
    """The trainer stops its training loaders and prepares them anew when it next needs them."""
    loop = trainer.fit_loop
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
        loop._data_fetcher = None
    loop._combined_loader = None


def validation_loaders(trainer: Trainer) -> list[Any]:
    """Loaders of validation, made anew by the user's hooks as the trainer will make its own; none where it has none."""
    if not trainer.enable_validation or trainer.limit_val_batches == 0:
        return []
    loaders = trainer.fit_loop.epoch_loop.val_loop._data_source.dataloader()
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
    return list(combined.flattened)


def run_validation_step(trainer: Trainer, batch: Any, *, of_several: bool) -> None:
    """The user's `validation_step` on a batch on the device, without its loop's hooks; afterwards as before.

    Args:
        trainer: Whose module and precision serve.
        batch: On the device.
        of_several: Whether there are several loaders, of which the step is told the first.
    """
    module = trainer.lightning_module
    stage, modes = trainer.state.stage, [(m, m.training) for m in module.modules()]
    arguments = [batch]
    if is_param_in_hook_signature(module.validation_step, "batch_idx", min_args=2):
        arguments.append(0)
    if of_several:
        arguments.append(0)
    trainer.state.stage = RunningStage.VALIDATING
    module.eval()
    try:
        with torch.no_grad(), trainer.precision_plugin.val_step_context():
            module.validation_step(*arguments)
    finally:
        trainer.state.stage = stage
        for m, mode in modes:
            m.training = mode


def offer_loaders(trainer: Trainer, loaders: CombinedLoader, before_use: Callable[[], None]) -> None:
    """When the trainer next asks for training loaders it gets these; from then on it asks whom it asked before."""
    loop = trainer.fit_loop
    source = loop._data_source

    class Built(_DataLoaderSource):
        def dataloader(self) -> Any:
            loop._data_source = source
            before_use()
            return loaders

    loop._data_source = Built(source.instance, source.name)


def on_device(trainer: Trainer, batch: Any) -> Any:
    """The batch as `training_step` gets it: converted, transferred, with all hooks of the user."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def run_training_step(trainer: Trainer, batch: Any, batch_idx: int) -> Any:
    """The output of the user's `training_step`, called without the strategy's wrapper, so without communication."""
    module = trainer.lightning_module
    kwargs = OrderedDict[str, Any](batch=batch)
    if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
        kwargs["batch_idx"] = batch_idx
    with trainer.precision_plugin.train_step_context():
        return module.training_step(*kwargs.values())


def takes_loader_iterator(module: LightningModule) -> bool:
    """Whether `training_step` asks for the loader's iterator in place of a batch."""
    return is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)


def run_optimization(
    trainer: Trainer, batch: Any, batch_idx: int, *, zero_grad: bool = True, with_optimizer: bool = True
) -> Any:
    """The loss of one training step with backward and optimizer, in Lightning's order of events.

    Args:
        trainer: Whose module, precision and optimizers serve.
        batch: On the device.
        batch_idx: Which batch of the epoch it is said to be.
        zero_grad: Whether the gradients of earlier batches are dropped, which no summing is to keep.
        with_optimizer: Whether the optimizers step; else only forward and backward are run.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        with nullcontext() if with_optimizer else _without_steps(trainer):
            return run_training_step(trainer, batch, batch_idx)
    optimizer = trainer.strategy._lightning_optimizers[0]
    accumulated = trainer.accumulate_grad_batches
    closure = Closure(
        lambda: ClosureResult.from_training_step_output(run_training_step(trainer, batch, batch_idx), accumulated),
        lambda loss: cast(None, trainer.strategy.backward(loss, optimizer.optimizer)),
        (lambda: module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer.optimizer))
        if zero_grad
        else None,
    )
    if with_optimizer:
        module.optimizer_step(trainer.current_epoch, batch_idx, optimizer, closure)
    else:
        closure()
    return None if closure._result is None else closure._result.loss


@contextmanager
def _without_steps(trainer: Trainer) -> Generator[None]:
    """Optimizer steps that a manual `training_step` asks for run their closure and nothing else in the block."""

    def step(optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        vars(optimizer)["_opt_called"] = True  # else schedulers warn of a step that comes too early
        with torch.enable_grad():
            return closure()

    with _replaced(trainer.strategy, optimizer_step=step):
        yield


@contextmanager
def without_optimization(trainer: Trainer, backward: Callable[..., None]) -> Generator[None]:
    """In the block `backward` runs where a manual `training_step` asks for one; optimizers only run their closure."""
    with _without_steps(trainer), _replaced(trainer.strategy, backward=backward):
        yield


def forward_and_backward(trainer: Trainer, batch: Any, batch_idx: int) -> None:
    """The user's `training_step` with every derivative that it asks for itself; no optimizer steps."""
    with _without_steps(trainer):
        run_training_step(trainer, batch, batch_idx)


@contextmanager
def _replaced(holder: Any, **values: Any) -> Generator[None]:
    """The object has these attributes of its own in the block."""
    state = vars(holder)
    before = {name: state[name] for name in values if name in state}
    state.update(values)
    try:
        yield
    finally:
        for name in values:
            state.pop(name, None)
        state.update(before)


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The trainer's callbacks."""
    return cast(Any, trainer).callbacks


@contextmanager
def silent(trainer: Trainer) -> Generator[None]:
    """No logger, no callback and no `self.log` hears of what happens in the block; no rank waits for another.

    Loggers and callbacks are there nevertheless, for a step may ask for them.
    """
    loggers = trainer.loggers
    hooks = vars(call)["_call_callback_hooks"]

    def call_others(other: Trainer, *args: Any, **kwargs: Any) -> None:
        if other is not trainer:
            hooks(other, *args, **kwargs)

    module, connector, results = trainer.lightning_module, trainer._logger_connector, trainer._results
    trainer.loggers = [_muted(logger) for logger in loggers]
    try:
        with (
            _replaced(call, _call_callback_hooks=call_others),
            # Also where the method was handed to a loss or a submodule.
            _replaced(module, log=ignore_log, log_dict=ignore_log, _current_fx_name="training_step"),
            _replaced(connector, _current_fx=connector._current_fx),
            nullcontext() if results is None else _replaced(results, log=_ignore, reset=_ignore),
            _block_parallel_sync_behavior(trainer.strategy, block=True),
        ):
            yield
    finally:
        trainer.loggers = loggers


def _muted(logger: Any) -> Any:
    """A logger that knows what this one does (its folder, its version) and writes nothing."""
    writing = ("log_metrics", "log_hyperparams", "log_graph", "log_image", "save", "finalize", "after_save_checkpoint")
    silenced: dict[str, Any] = {name: _ignore for name in writing if hasattr(logger, name)}
    kind, experiment = type(logger), DummyLogger().experiment
    silenced |= {"experiment": property(lambda self: experiment)}
    muted: Any = object.__new__(type(kind.__name__, (kind,), silenced))
    vars(muted).update(vars(logger))
    return muted


def _ignore(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


def before_first_step(trainer: Trainer, prepare: Callable[[Any, int], None], then: Undo) -> Undo:
    """Calls `prepare(batch, batch_idx)` right before the first training step, after all that precedes it, `then` after.

    Returns:
        What undoes it.
    """
    undo = ExitStack()

    def prepare_once(batch: Any, batch_idx: int) -> None:
        undo.close()
        prepare(batch, batch_idx)

    undo.callback(before_steps(trainer, prepare_once, then))
    return undo.close


def before_steps(trainer: Trainer, prepare: Callable[[Any, int], None], then: Undo) -> Undo:
    """Calls `prepare(batch, batch_idx)` right before each training step, `then` right after; returns what undoes it."""
    epoch_loop, undo = trainer.fit_loop.epoch_loop, ExitStack()

    def prepared(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            try:
                prepare(next(iter(args[-1].values())), epoch_loop.batch_idx)
                return original(*args)
            finally:
                then()

        return run

    for loop in (epoch_loop.automatic_optimization, epoch_loop.manual_optimization):
        undo.callback(_overridden(loop, "run", prepared))
    return undo.close


def _overridden(holder: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Undo:
    """Gives an object a method of its own, made of that which it has; returns what takes it away."""
    vars(holder)[name] = make(getattr(holder, name))
    return partial(vars(holder).pop, name, None)


def wrap_steps(trainer: Trainer, wrap: Callable[[Callable[[], Any], Any, int, bool], Any]) -> Undo:
    """Runs each forward-and-backward as `wrap(step, batch, batch_idx, is_accumulating)`; returns what undoes it."""

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def make_closure(kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Any:
            closure: Any = original(kwargs, optimizer, batch_idx)
            step = closure.closure
            is_accumulating = batch_idx % trainer.accumulate_grad_batches != 0
            closure.closure = lambda: wrap(step, next(iter(kwargs.values())), batch_idx, is_accumulating)
            return closure

        return make_closure

    return _overridden(trainer.fit_loop.epoch_loop.automatic_optimization, "_make_closure", wrapped)


def wrap_validation(trainer: Trainer, wrap: Callable[[Callable[[], Any]], Any]) -> Undo:
    """Runs every validation step as `wrap(step)`; returns what undoes it."""
    return _overridden(
        trainer.strategy,
        "validation_step",
        lambda original: lambda *args, **kwargs: wrap(partial(original, *args, **kwargs)),
    )


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


def state_holders(trainer: Trainer) -> list[Any]:
    """What a step may change beside the module: optimizers, schedulers, scaler, the trainer's own marks and counts."""
    loops: list[Any] = [trainer.fit_loop, trainer.fit_loop.epoch_loop]
    loops += [loops[1].automatic_optimization, loops[1].manual_optimization, loops[1].val_loop]
    holders: list[Any] = [trainer, *loops, *trainer.optimizers, *trainer.strategy._lightning_optimizers]
    counts: list[Any] = [v for loop in loops for v in vars(loop).values() if is_dataclass(v)]
    while counts:
        holders.append(count := counts.pop())
        counts += [v for v in vars(count).values() if is_dataclass(v)]
    holders += [config.scheduler for config in trainer.lr_scheduler_configs]
    scaler = getattr(trainer.precision_plugin, "scaler", None)  # of 16-bit precision
    holders += [one for one in (scaler, getattr(trainer, "datamodule", None)) if one is not None]
    return holders


def should_log(trainer: Trainer) -> bool:
    """Whether this training step is one that is logged."""
    return trainer._logger_connector.should_update_logs


def logging_step(trainer: Trainer) -> int:
    """The x-axis of the loggers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def is_initial_hparam(holder: Any, name: str) -> bool:
    """Whether the loggers will record a hyperparameter of that name."""
    return name in (getattr(holder, "_hparams_initial", None) or {})


def set_initial_hparams(holder: Any, name: str, value: Any) -> None:
    """Overwrites a hyperparameter in what the loggers will record, if it is there."""
    if is_initial_hparam(holder, name):
        holder._hparams_initial[name] = value


def leave_out_module_names(trainer: Trainer) -> Undo | None:
    """Keeps a `PyTorchProfiler` from hooks on every submodule, each of which would divide the forward of its parents.

    Returns:
        What undoes it; None where it has none.
    """
    profiler = cast(Any, trainer).profiler
    if not isinstance(profiler, PyTorchProfiler) or not profiler._record_module_names:
        return None
    if profiler._register is not None:
        profiler._register.__exit__(None, None, None)
    profiler._record_module_names = False
    return partial(setattr, profiler, "_record_module_names", True)


def tap_loaders(strategy: Strategy, tap: Callable[[object], object]) -> Undo:
    """Passes every loader that the trainer prepares through `tap`; returns what undoes it."""
    return _overridden(strategy, "process_dataloader", lambda original: lambda *loader: tap(original(*loader)))
