"""The plan in a Lightning checkpoint: plain JSON values, reused if model, device and settings are still the same."""

from __future__ import annotations

import hashlib
import json
import weakref
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any
from uuid import uuid4

import lightning
import torch
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from ..batch_search.settings import Planner, Settings
from ..devices import device_name
from ..plans.plan import StepPlan
from ..regions.chosen_modules import submodules
from ..reports.result import Candidate, Result
from ..schedules.stored import reading, write_whole

_VERSION = 5

_NO_MATTER = {"report_dir", "plan_path", "resume", "self_check", "on_oom", "batch_arg_name", "rebatch_fn"}
"""Settings with which no other plan is found."""

_PLAIN = tuple(field.name for field in fields(Result) if field.name not in ("step", "trials"))
"""Of a result, what is stored as it is."""

_nameless: dict[int, tuple[weakref.ref[Any], str]] = {}
"""Address → a planner without a name, as long as it lives, and what it is called here."""


def fingerprint(trainer: Trainer, settings: Settings) -> str:
    """What a plan depends on, in one word: module structure, precision, device, settings and versions."""
    module, root = trainer.lightning_module, trainer.strategy.root_device
    names = {m: name for name, m in submodules(module)}
    asked = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name not in _NO_MATTER}
    asked["planner"] = _planner_name(settings.planner)
    asked["modules"] = settings.modules and [m if isinstance(m, str) else names.get(m) for m in settings.modules]
    facts: list[Any] = [
        _VERSION,
        [(name, type(m).__qualname__) for name, m in submodules(module)],
        [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()],
        trainer.precision,
        device_name(root),
        trainer.world_size,
        [type(optimizer).__qualname__ for optimizer in trainer.strategy.optimizers],
        asked,
        [torch.__version__, lightning.__version__],
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def _planner_name(planner: Planner) -> str:
    """By which it is known in another run; what has no name in a file is known in this process alone."""
    if isinstance(planner, str):
        return planner
    name = f"{getattr(planner, '__module__', '')}.{getattr(planner, '__qualname__', '<none>')}"
    if "<" not in name:
        return name
    try:
        reference: weakref.ref[Any] = weakref.ref(planner)
    except TypeError:  # nobody can tell whether it is the same another time
        return uuid4().hex
    known = _nameless.get(id(planner))
    if known is None or known[0]() is not planner:  # another one has taken its place
        known = _nameless[id(planner)] = reference, uuid4().hex
    return known[1]


def to_state(result: Result, mark: str) -> dict[str, Any]:
    """The result as plain values, which load with `weights_only=True`."""
    plain = {name: getattr(result, name) for name in _PLAIN}
    trials = json.dumps([asdict(t) for t in result.trials])
    return {"fingerprint": mark, **plain, "trials": trials, "step": result.step.to_json()}


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Stores what `to_state` made in a file; what was there stays until the new is complete."""
    write_whole(path, json.dumps(state))


def result_in_file(path: Path, mark: str) -> Result | None:
    """The result that `write_state` stored; None where model, device or settings have changed since.

    Raises:
        ValueError: The file holds something else, or not all of it.
    """
    try:
        with reading("result"):
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if state["fingerprint"] and state["step"]:  # a report, or another program's file, has neither
                return resumed_result(state, mark)
            raise TypeError("it names no model")
    except ValueError as error:
        raise ValueError(f"plan_path names {path}, but {error}. Remedy: delete it, or name another file") from error


def stored_result(settings: Settings, state: dict[str, Any] | None, mark: str) -> Result | None:
    """The result of a resumed run, whose state this is, or of `plan_path`, if it was made for the same."""
    if state is not None and settings.resume:
        result = resumed_result(state, mark)
        if result is not None:
            rank_zero_info(f"Rematerialization resumes with batch size {result.batch_size} and the stored plan")
            return result
        rank_zero_info("Rematerialization plans anew: the stored plan was made for another model, device or setting")
    path = settings.plan_path
    if path is not None and Path(path).exists():
        result = result_in_file(Path(path), mark)
        if result is not None:
            rank_zero_info(f"Rematerialization uses the plan of {path}")
            return result
        rank_zero_warn(f"the plan of {path} was made for another model, device or setting and is made anew")
    return None


def resumed_result(state: dict[str, Any], mark: str) -> Result | None:
    """The stored result; None where model, device or settings have changed since."""
    if state.get("fingerprint") != mark:
        return None
    return Result(
        **{name: state[name] for name in _PLAIN},
        step=StepPlan.from_json(state["step"]),
        trials=tuple(Candidate(**t) for t in json.loads(state["trials"])),
    )
