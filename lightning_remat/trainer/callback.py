"""Rematerialization: the one line in a Trainer that makes a model train under a byte budget."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from ..batch_search.resizing import batch_size_of, has_batch_dimension
from ..batch_search.settings import Settings
from ..batch_search.trial import uninstall
from ..budget import format_bytes
from ..devices import empty_cache
from ..execution.compiling import StretchCompiler
from ..execution.rewriter import compile_programs
from ..measure.out_of_memory import is_out_of_memory
from ..measure.step_clock import Reading, StepClock
from ..regions.footprint import held_tensors
from ..reports.report import draw_plots, out_of_memory_note, print_tables, write_report
from ..reports.result import Result
from . import ranks
from .buckets import tell_of_buckets
from .larger_steps import LargerSteps
from .lightning_step import LightningTrial, StepFailedError
from .loader_tap import LoaderTap
from .loaders import common_batch_size, loader_batch_size
from .logger_figures import show_in_loggers
from .logs_in_forward import divided_at_logs
from .oom_retry import StepRetry
from .planning import check_first_size, installed, planned
from .private_api import (
    before_first_step,
    before_steps,
    leave_out_module_names,
    logging_step,
    should_log,
    tap_loaders,
    training_loaders,
    wrap_steps,
    wrap_validation,
)
from .rehearsal import rehearsed
from .resume import fingerprint, stored_result, to_state, write_state
from .setup import accumulate, check_searchable, check_supported, log_batch_size, move_before_tuners, set_batch_size
from .signature import taking
from .step_check import passes_check

_NOTICEABLY = 1.02
"""Times the budget, above which a user is told that a step needed more."""

_LOGGED = ("batch_size", "budget_bytes", "plain_peak_bytes", "predicted_peak_bytes", "recompute_overhead")


class Rematerialization(Callback):
    """Trains under a memory budget, at a batch size that fits, with exactly the gradients of the plain model.

    Right before the first training step, on its batch and after all hooks that precede it, it profiles the submodules
    that `training_step` calls, plans which activations to keep, discard and recompute so that the step fits the budget,
    executes two forwards and backwards to check it, and rewrites the submodules in place for the length of `fit`.
    Weights, buffers, metrics and random states are left as they were, and nothing is read that training does not get:
    a run with the callback at a fixed batch size equals the run without it.

    On one device, a batch that is larger than those planned for (longer texts, larger images) is planned anew where the
    step might exceed the budget with it; where it cannot fit it gets the lowest peak, and a warning tells.

    A search (`batch_size="auto"`) has to end before the epoch begins. It is made in `on_fit_start`, on a batch that the
    loaders yield and then begin again, after the start hooks of module and callbacks, which are called once more when
    training starts; it also executes optimizer steps. All of that is undone.

    Where the step cannot be tried (it calls no submodule, it raises when it is run apart from training) one warning
    tells so, and the plain model is trained.

    Logs to every logger, at every log step: `remat/batch_size`, `remat/budget_bytes`, `remat/plain_peak_bytes`,
    `remat/predicted_peak_bytes`, `remat/recompute_overhead` (fraction), and since the last log `remat/peak_bytes`
    (on the CPU that of the logged step), `remat/step_seconds` and `remat/samples_per_second` (of all devices; data
    loading counts, validation does not).

    Args:
        planner: A name of `PLANNERS`, or a function `(graph, budget_bytes) -> Schedule`.
        memory_budget: The peak of everything alive on the device in a training step: bytes, `"8GiB"`, a fraction of
            the device's memory, or `"50%"` of the plain step's peak. None: what is free, less the margin. With None or
            a fraction, all counts that the device must have: what kernels of the CPU use beside tensors (as far as the
            system tells), what CUDA's allocator reserves.
        batch_size: `"auto"` searches, `"keep"` leaves it, a number sets it (refused if no plan fits).
        margin: Part of the device's memory left free, where the budget is None or a fraction.
        objective: `"batch_size"`: the largest that fits. `"throughput"`: the most samples per second.
        max_overhead: Most recomputation allowed, as a fraction of the plain step's seconds.
        min_batch_size: Smallest size to consider.
        max_batch_size: Largest size to consider, of those that the samples can fill; None for all.
        multiple_of: Sizes to consider are multiples of it.
        effective_batch_size: Samples an optimizer step over all devices: sets `accumulate_grad_batches`.
        batch_arg_name: The attribute of module, datamodule or their hyperparameters that holds the batch size.
        rebatch_fn: `(loader, batch_size) -> loader` for loaders that do not say their batch size.
        include_validation: Whether validation loaders get the new batch size too.
        resume: Whether a run resumed from a checkpoint reuses the plan and batch size stored in it.
        plan_path: A report of an earlier run to reuse if it fits this one; written otherwise.
        on_infeasible: Where nothing fits: `"raise"`, plan the lowest peak (`"minimum"`), or train the `"plain"` model.
            The latter is also done, with a warning, where nothing can be captured, unless a size is searched.
        on_oom: When a step runs out of memory: `"raise"`, or `"replan"` and retry it once under a tighter budget; a
            validation step is retried as it is, after what is unused was let go.
        modules: Submodules of the LightningModule to rewrite, or their names; None for those that it calls.
        self_check: Whether steps with and without the plan are compared first, bit by bit (loss, gradients,
            buffers, random states): on a few samples of the batch, with other random numbers, later in the epoch, in
            the next one, with dropout and batch norm in eval mode. On a difference one warning tells what differs, and
            the plain model is trained. Nothing is said of a step that is not the same twice, or that does not fit.
        compile_stretches: Whether `torch.compile` makes one of the operations that run again one after another, as
            `lightning_remat.compile_stretches` documents: after what is compared bit by bit, which it may not be.
        report_dir: Where report and plots go; None for the logger's folder, and for nowhere where there is no logger.
        gather_bandwidth: Bytes a second at which parameters under `fully_shard` are gathered, or "measure"; with it is
            planned, too, which units are resharded after their forward. None leaves that as it was set.

    Attributes:
        result: What was found, from the first training step on; None before, and where the plain model is trained.

    Raises:
        ValueError: An argument is wrong.
    """

    @taking(Settings)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.settings = Settings(*args, **kwargs)
        self.result: Result | None = None
        self._state: dict[str, Any] | None = None  # of the checkpoint that is resumed, or to be stored
        self._undo, self._undo_size = ExitStack(), ExitStack()  # the latter on an error before anything was trained
        self._tap: LoaderTap | None = None
        self._left_alone_because: str | None = None  # told once the first step has been trained
        self._clock: StepClock | None = None
        self._readings: list[Reading] = []
        self._has_told_of_excess = False

    # --- before training -------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what cannot work, and taps the loaders."""
        if stage != "fit":
            return
        check_supported(trainer, pl_module, self)
        for name in self.settings.without_effect():
            rank_zero_warn(
                f"Rematerialization: {name} has no effect with batch_size={self.settings.batch_size!r} and "
                f"memory_budget={self.settings.memory_budget!r}"
            )
        if (undo := leave_out_module_names(trainer)) is not None:
            self._undo.callback(undo)
            rank_zero_info("Rematerialization: PyTorchProfiler records no module names, which would divide forwards")
        self._undo.enter_context(divided_at_logs())
        move_before_tuners(trainer, self)
        self.result, self._clock, self._readings, self._left_alone_because = None, None, [], None
        self._tap = LoaderTap(trainer, self.settings)
        self._undo.callback(tap_loaders(trainer.strategy, self._tap))
        if isinstance(self.settings.batch_size, int):  # before optimizers are configured, who may count the batches
            self._set_batch_size(trainer, self.settings.batch_size)

    def _set_batch_size(self, trainer: Trainer, batch_size: int) -> None:
        assert self._tap is not None, "no setup"
        self._undo_size.callback(set_batch_size(trainer, batch_size, self.settings))
        self._tap.batch_size = batch_size

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Settles the batch size; the step is planned when it is about to be run for the first time."""
        settings, tap = self.settings, self._tap
        assert tap is not None, "no setup"
        mark = fingerprint(trainer, settings)
        known = ranks.share(trainer, lambda: stored_result(settings, self._state, mark))  # files may be rank 0's only
        if settings.batch_size == "auto":
            if known is None:
                known = self._search(trainer, tap)
                if known is None:
                    tap.offer(with_optimizers=False)
                    return
            changes = {loader_batch_size(loader) for loader in tap.loaders} != {known.batch_size}
            self._set_batch_size(trainer, known.batch_size)
            tap.offer(with_optimizers=changes or settings.effective_batch_size is not None)
            log_batch_size(trainer, known.batch_size, settings)
        elif settings.batch_size != "keep":
            self._set_batch_size(trainer, settings.batch_size)  # of what was made since `setup`, too
            log_batch_size(trainer, settings.batch_size, settings)
        self._undo.callback(
            before_first_step(trainer, partial(self._prepare, trainer, mark, known), self._end_metering)
        )

    def _search(self, trainer: Trainer, tap: LoaderTap) -> Result | None:
        """What was found before training begins; None where the plain model is trained."""
        settings = self.settings
        try:
            with rehearsed(trainer, settings, tap, self) as trial:
                if trial is None:
                    return None
                check_searchable(trial, settings)
                found = planned(trial, settings, self._leave_alone)
                if found is None:
                    return None
                uninstall(found[1])  # it is installed in the first step, when all is as it will stay
                return found[0]
        except StepFailedError as error:
            self._leave_alone(f"the training step cannot be tried before training begins: {error.__cause__!r}")
            return None

    def _prepare(self, trainer: Trainer, mark: str, known: Result | None, batch: Any, batch_idx: int) -> None:
        """Plans and rewrites what the first step is about to call; on an error everything is as before."""
        settings = self.settings
        trial = LightningTrial(trainer, settings, batch, batch_idx, with_optimizer=False)
        assert self._tap is not None, "no setup"
        check_first_size(trial, self._tap.batch_size)
        if settings.batch_size == "keep":  # the loader may not have told
            accumulate(trainer, trial.batch_size, settings)
        if known is not None and settings.batch_size == "keep" and known.batch_size != trial.batch_size:
            rank_zero_info(f"Rematerialization plans anew: the stored plan is for batches of {known.batch_size}")
            known = None
        try:
            found = None if known is None else installed(trial, settings, known)
            found = found or planned(trial, settings, self._leave_alone, known and known.batch_size)
            if found is None:
                return
            result, modules = found
            if not passes_check(trial, settings, result, modules, self._leave_alone):
                return
        except StepFailedError as error:
            self._leave_alone(f"the training step cannot be tried: {error.__cause__!r}")
            return
        finally:
            trial.close()  # the step begins where its trial began, not between the pieces that planning left
        self._undo.callback(lambda: uninstall(modules))
        if settings.compile_stretches:
            compile_programs(modules, StretchCompiler())
        self._adopt(mark, result)
        self._undo_size.pop_all()
        if trainer.is_global_zero:
            print_tables(result)
            if settings.plan_path is not None:
                write_state(Path(settings.plan_path), to_state(result, mark))
        tell_of_buckets(trainer)
        self._report(trainer)
        self._start_clock(trainer)
        self._meter(trainer, batch)
        larger = LargerSteps(trainer, settings, result, modules, batch, self._leave_alone)
        self._undo.callback(larger.close)
        self._undo.callback(
            before_steps(trainer, partial(self._prepare_larger, trainer, mark, larger), self._end_metering)
        )
        if settings.on_oom == "replan":
            if trainer.world_size > 1 or not trainer.lightning_module.automatic_optimization:
                rank_zero_warn("on_oom='replan' has no effect with several devices or manual optimization")
            else:
                retry = StepRetry(trainer, settings, result, modules, partial(self._adopt_tighter, trainer, mark))
                self._undo.callback(wrap_steps(trainer, retry))
                self._undo.callback(wrap_validation(trainer, retry.validated))

    def _prepare_larger(self, trainer: Trainer, mark: str, larger: LargerSteps, batch: Any, batch_idx: int) -> None:
        """Plans anew where the plan is not known to keep the budget with this batch."""
        if self._clock is None or not larger.is_too_large(batch, batch_idx):
            self._meter(trainer, batch)
            return
        result = larger.plan(batch, batch_idx)
        self._has_told_of_excess |= larger.is_over
        if result is not None:
            self._adopt(mark, result)
        if self._left_alone_because is None:
            self._start_clock(trainer)
            self._meter(trainer, batch)
        else:
            self.result = self._state = self._clock = None

    def _adopt_tighter(self, trainer: Trainer, mark: str, result: Result) -> None:
        """What was measured of the step so far ran out of memory."""
        self._adopt(mark, result)
        self._end_metering()
        self._start_clock(trainer)

    def _adopt(self, mark: str, result: Result) -> None:
        self.result, self._state = result, to_state(result, mark)

    def _start_clock(self, trainer: Trainer) -> None:
        """Counts from this step on."""
        self._clock = StepClock(trainer.strategy.root_device, with_scratch=self.settings.counts_scratch)
        self._clock.start()

    def _leave_alone(self, why: str) -> None:
        self._left_alone_because = why

    # --- during training -------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock anew, where a learning rate was looked for meanwhile."""
        if self._clock is not None:
            self._start_clock(trainer)

    def _meter(self, trainer: Trainer, batch: Any) -> None:
        """Meters the memory of a step that will be logged; not where PyTorch's profiler may want to begin in it."""
        profiles = isinstance(cast(Any, trainer).profiler, PyTorchProfiler)
        if self._clock is not None and should_log(trainer) and not profiles:
            self._clock.meter(held_tensors(trainer.lightning_module, trainer.strategy.optimizers, batch))

    def _end_metering(self) -> None:
        if self._clock is not None:
            self._clock.close()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the step, and logs at log steps; tells why the plain model is trained, if it is."""
        if self._left_alone_because is not None:
            why, self._left_alone_because = self._left_alone_because, None
            rank_zero_warn(f"Rematerialization leaves the model as it is: {why}")
        if self._clock is None or self.result is None:
            return
        told = common_batch_size(training_loaders(trainer))
        self._clock.count(batch_size_of(batch, told) if has_batch_dimension(batch) else 1)
        if should_log(trainer):
            self._log(trainer, self._clock.read())

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Every epoch begins with memory in one piece, as the trial of the step did; validation leaves other pieces."""
        if self.settings.counts_scratch:
            empty_cache(trainer.strategy.root_device)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock: throughput is that of training."""
        if self._clock is not None:
            self._clock.stop()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets the clock run on."""
        if self._clock is not None:
            self._clock.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs what no log step has seen, and adds what was measured to the report."""
        if self._clock is not None and self.result is not None:
            self._log(trainer, self._clock.read())
            self._report(trainer)

    def _log(self, trainer: Trainer, reading: Reading | None) -> None:
        result = self.result
        if reading is None or result is None:
            return
        self._readings.append(reading)
        if not self._has_told_of_excess and (reading.peak_bytes or 0) > _NOTICEABLY * result.budget_bytes:
            self._has_told_of_excess = True
            rank_zero_warn(
                f"a training step needed {format_bytes(reading.peak_bytes or 0)}, more than the budget of "
                f"{format_bytes(result.budget_bytes)}: it did more than the step that was planned (second derivatives, "
                "layers that were left out then), or planned something new. Remedy: begin with a step that does all, "
                "or lower memory_budget"
            )
        metrics: dict[str, float] = {f"remat/{name}": getattr(result, name) for name in _LOGGED}
        metrics["remat/step_seconds"] = reading.step_seconds
        metrics["remat/samples_per_second"] = reading.samples_per_second * trainer.world_size
        if reading.peak_bytes is not None:
            metrics["remat/peak_bytes"] = reading.peak_bytes
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=logging_step(trainer))

    def _report(self, trainer: Trainer) -> None:
        """Writes what is known so far where the logger writes; every rank asks, since they agree upon `log_dir`."""
        folder = self.settings.report_dir or (trainer.log_dir if trainer.loggers else None)
        if folder is None or self.result is None or getattr(trainer, "fast_dev_run", False):
            return
        if trainer.is_global_zero:
            write_report(self.result, Path(folder), self._readings, title=type(trainer.lightning_module).__name__)
            draw_plots(self.result, Path(folder))
            show_in_loggers(trainer.loggers, Path(folder))
            if not self._readings:
                rank_zero_info(f"Rematerialization: what is kept and why is in {Path(folder) / 'remat_report.html'}")

    # --- the end ---------------------------------------------------------------------------------------------------

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undoes the patches; an out-of-memory error gets the measured table and the remedies."""
        if self.result is not None and is_out_of_memory(exception):
            exception.add_note(out_of_memory_note(self.result))
        self._undo_size.close()
        self._undo_patches()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undoes the patches."""
        if stage == "fit":
            self._undo_patches()

    def _undo_patches(self) -> None:
        if self._clock is not None:
            self._clock.close()
            self._clock = None
        self._undo_size.pop_all()
        self._tap = None
        self._undo.close()

    def state_dict(self) -> dict[str, Any]:
        """Plan and batch size as plain values, for the checkpoint."""
        return {} if self._state is None else self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What a resumed run starts from."""
        self._state = state_dict or None
