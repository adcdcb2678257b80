"""`find_batch_size`: the search for users of Fabric and plain PyTorch, without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..budget import Budget
from ..capture.synchronized_norms import unsynchronized
from ..devices import device_of
from ..errors import check_kind
from ..execution.modified import retried
from ..measure.bandwidth import Bandwidth, bandwidth_of
from ..measure.device_memory import enforced
from ..measure.meter import measure_peak
from ..measure.out_of_memory import is_out_of_memory
from ..measure.tensor_bytes import storage_bytes
from ..module_state.agreement import all_ranks, first_rank, together
from ..module_state.batches import tensors_held
from ..module_state.own_exchanges import exchanging_alone
from ..module_state.preserve import preserved
from ..module_state.sharding import has_units, settle, settled
from ..plans.step_memory import Surroundings
from ..regions.calls import View
from ..regions.footprint import alive_bytes, held_tensors, optimizer_footprint, optimizer_tensors, outside_bytes
from ..regions.gathering import gathering_of
from ..regions.handed_on import handed_on
from ..regions.look_through import NoCallError, look_through
from ..reports.report import draw_plots, write_report
from ..reports.result import Result
from ..schedules.schedule import Schedule
from .resizing import batch_size_of
from .search import find
from .settings import Settings
from .trial import STEPS_PER_TRIAL
from .tried_batch import TriedBatch

T = TypeVar("T")


def find_batch_size(
    module: nn.Module,
    batch: Any,
    loss_of: Callable[[Any], Tensor],
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    planner: str | Callable[..., Schedule] = "auto",
    *,
    memory_budget: Budget | None = None,
    batch_size: int | Literal["auto", "keep"] = "auto",
    margin: float = 0.05,
    objective: Literal["batch_size", "throughput"] = "batch_size",
    max_overhead: float | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    multiple_of: int = 1,
    modules: Sequence[Any] | None = None,
    is_accumulating: bool = False,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    backward: Callable[[Tensor], object] = torch.autograd.backward,
    report_dir: str | Path | None = None,
    gather_bandwidth: Bandwidth | None = None,
) -> Result:
    """The batch size and plan that fit, executed within the budget; the module is rewritten by the plan.

    The same search as `Rematerialization`: candidates are planned, and the chosen one runs two real steps with
    backward and optimizer. Everything that these change is put back. `restore(module)` undoes the rewriting, of every
    submodule in `result.step.keys`.

    >>> import torch
    >>> from torch import nn
    >>> module = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)))
    >>> batch = torch.randn(8, 32)
    >>> found = find_batch_size(module, batch, lambda x: module(x).sum(), planner="periodic", memory_budget="128KiB")
    >>> found.batch_size > len(batch) and found.measured_peak_bytes <= found.budget_bytes
    True

    Args:
        module: On its device, in training mode.
        batch: One real batch, on the device; other sizes repeat or cut it along the leading dimension.
        loss_of: The loss of a batch; calls `module`, or the wrapper in which DDP has it.
        optimizers: Those that step after the backward; their state and step are part of the peak.
        planner: A name of `PLANNERS`, or a function.
        memory_budget, batch_size, margin, objective, max_overhead: See `Rematerialization`.
        min_batch_size, max_batch_size, multiple_of, modules: See there.
        is_accumulating: Whether gradients of several batches are summed before a step.
        precision: The context in which the forward runs, such as `fabric.autocast`.
        backward: Runs the backward of a loss, such as `fabric.backward`.
        report_dir: Where report and plots go; None for none.
        gather_bandwidth: See `rematerialize`.

    Returns:
        What was found; `report.print_tables` shows it.

    Raises:
        TypeError: It is no module.
        ValueError: An argument is wrong.
        InfeasibleBudgetError: Nothing fits; the module is as it was.
    """
    check_kind(module, nn.Module, "the one that loss_of calls")
    settings = Settings(
        planner=planner,
        memory_budget=memory_budget,
        batch_size=batch_size,
        margin=margin,
        objective=objective,
        max_overhead=max_overhead,
        min_batch_size=min_batch_size,
        max_batch_size=max_batch_size,
        multiple_of=multiple_of,
        modules=modules,
        gather_bandwidth=gather_bandwidth,
    )
    several = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    trial = PlainTrial(module, batch, loss_of, several, precision, backward, modules, is_accumulating, gather_bandwidth)
    result, _ = find(trial, settings)
    if report_dir is not None:
        write_report(result, Path(report_dir))
        draw_plots(result, Path(report_dir))
    return result


class PlainTrial:
    """The training step of a hand-written loop as a `Trial`."""

    most_samples: int | None = None
    within: int | None = None

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        loss_of: Callable[[Any], Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        precision: Callable[[], AbstractContextManager[Any]],
        backward: Callable[[Tensor], object],
        modules: Sequence[Any] | None,
        is_accumulating: bool,
        gather_bandwidth: Bandwidth | None = None,
    ) -> None:
        self.module, self.loss_of = module, loss_of
        self.optimizers, self.modules, self.is_accumulating = optimizers, modules, is_accumulating
        self.precision, self.backward = precision, backward
        self.gather_bandwidth = bandwidth_of(module, gather_bandwidth)
        self.batch_size = batch_size_of(batch)
        self.num_devices = dist.get_world_size() if has_units(module) else 1
        self._batch = TriedBatch(batch, self.batch_size)
        self.device = device_of(module.parameters())

    @contextmanager
    def undone(self) -> Generator[None]:
        """Nothing that the block does to module, optimizers, batch or random states stays."""
        settle(self.module)  # before it is recorded
        with preserved([self.module], self.optimizers), settled(self.module), torch.enable_grad():
            try:
                yield
            finally:
                self._batch.put_back()

    def batch_of(self, batch_size: int) -> Any:
        """The batch, repeated or cut to that size."""
        return self._batch.of(batch_size)

    def look_through(self, batch_size: int, modules: Sequence[Any] | None = None) -> View:
        """The calls of the modules (None: of those that the user named, or that the step calls) at that batch size."""
        may_nest, modules = modules is not None, self.modules if modules is None else modules
        root = _Root(self.module) if modules is None else self.module

        @contextmanager
        def prepared() -> Generator[None]:
            with self.undone(), exchanging_alone(self.module), self.precision():
                self.batch_of(batch_size)  # before the calls are watched
                yield

        def step() -> Tensor:
            return self.loss_of(self.batch_of(batch_size))

        try:
            view = look_through(root, step, modules, may_nest=may_nest, undone=prepared)
        except NoCallError as error:
            if modules is not None:
                raise
            raise NoCallError(
                f"loss_of(batch) does not call the module ({type(self.module).__name__}), or that has no parameters to "
                "train. Remedy: give the loss as a function of the batch, `lambda batch: loss(module(batch))`"
            ) from error
        if modules is not None:
            return view
        calls = [replace(call, name=call.name.removeprefix("module").removeprefix(".")) for call in view.calls]
        return replace(view, calls=calls)

    def surroundings(self, view: View, batch_size: int) -> Surroundings:
        """What is alive beside the regions."""
        batch = tensors_held(self.batch_of(batch_size))
        with self.undone():
            optimizer = optimizer_footprint(self.module, self.optimizers, self.device)
        return Surroundings(
            resident_bytes=outside_bytes(self.module, view, batch) + optimizer.state_bytes,
            optimizer_step_bytes=optimizer.step_bytes + storage_bytes(batch),
            is_accumulating=self.is_accumulating,
            seconds=optimizer.step_seconds,
            gathering=gathering_of(view, self.gather_bandwidth),
            order=view.order,
            over=view.over,
            handed_on=handed_on(self.module, view, batch),
        )

    def measure(self, batch_size: int, *, with_scratch: bool) -> int:
        """The measured peak of two real steps with backward and optimizer, in bytes."""
        step = partial(self._measured, batch_size, with_scratch)
        return retried(lambda: together(self.module, step, is_out_of_memory))

    def _measured(self, batch_size: int, with_scratch: bool) -> int:
        peak_bytes = 0
        with self.undone(), unsynchronized(), exchanging_alone(self.module), ExitStack() as stack:
            if self.within is not None:
                held = storage_bytes(held_tensors(self.module, self.optimizers, self.batch_of(batch_size)))
                stack.enter_context(enforced(self.device, self.within, held))
            for i in range(STEPS_PER_TRIAL):
                batch = self.batch_of(batch_size)
                alive = [self.module, *optimizer_tensors(self.optimizers), *tensors_held(batch)]
                with measure_peak(self.device, alive, with_scratch=with_scratch) as measured:
                    self._step(batch, zero_grad=i == 0 or not self.is_accumulating)
                peak_bytes = max(peak_bytes, measured.peak_bytes)
        return peak_bytes

    def _step(self, batch: Any, *, zero_grad: bool) -> None:
        with self.precision():
            loss = self.loss_of(batch)
        if zero_grad:  # after the forward, as Lightning does: a loop that does it before needs less
            for parameter in self.module.parameters():
                parameter.grad = None
        self.backward(loss)
        for optimizer in self.optimizers:
            optimizer.step()

    def alive_bytes(self) -> int:
        """Bytes on the device before the search, which count in the budget and are not free."""
        return alive_bytes(self.device, held_tensors(self.module, self.optimizers, self._batch.given))

    def leaves_one_sample(self, batch_size: int) -> bool:
        """Epochs are the caller's."""
        del batch_size
        return False

    def share(self, compute: Callable[[], T]) -> T:
        """What `compute` returns on the first of the processes that share the module, on each."""
        return first_rank(self.module, compute)

    def least(self, value: int) -> int:
        """The least of the values of the processes that share the module."""
        return min(all_ranks(self.module, value))


class _Root(nn.Module):
    """Stands above the module, so that the module itself is one of the submodules to choose from."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
