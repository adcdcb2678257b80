"""A run resumed from a Lightning checkpoint goes on with the stored plan and batch size, at the right epoch."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from remat_runs import Classifier, network, run, seeded
from torch import nn

from lightning_remat import Rematerialization
from lightning_remat.batch_search.settings import Settings
from lightning_remat.planners.dtr import plan_dtr
from lightning_remat.planners.rotor import plan_rotor
from lightning_remat.trainer.resume import fingerprint

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
]


def remat(**options: Any) -> Rematerialization:
    return Rematerialization("periodic", **{"memory_budget": "8MiB", **options})


def save(root: Path, **options: Any) -> tuple[Path, Rematerialization]:
    callback = remat(**options)
    trainer = run(root, seeded(), callback, max_steps=-1, max_epochs=1)
    path = root / "run.ckpt"
    trainer.save_checkpoint(path)
    return path, callback


@pytest.mark.slow
def test_resumed_run_continues_with_the_stored_plan(tmp_path: Path) -> None:
    path, first = save(tmp_path)
    assert first.result is not None
    assert first.result.batch_size > 8
    second, module = remat(), seeded()
    trainer = run(tmp_path, module, second, max_steps=-1, max_epochs=3, fit={"ckpt_path": path})
    assert second.result is not None
    assert second.result.plan.schedule == first.result.plan.schedule
    assert second.result.batch_size == first.result.batch_size
    num_batches = -(-64 // first.result.batch_size)
    # Two more epochs of the larger batches, counted on from the first.
    assert module.sizes[0] == first.result.batch_size
    assert module.steps == 2 * num_batches
    assert trainer.current_epoch == 3
    assert trainer.global_step == 3 * num_batches


@pytest.mark.slow
def test_state_holds_plain_values(tmp_path: Path) -> None:
    path, _ = save(tmp_path)
    states = torch.load(path, weights_only=True)["callbacks"]
    state = next(v for k, v in states.items() if "Rematerialization" in k)
    assert state["batch_size"] > 8


@pytest.mark.slow
@pytest.mark.parametrize("change", ["budget", "model", "resume"])
def test_what_has_changed_is_planned_anew(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning_remat.trainer.planning as planning_module

    path, _ = save(tmp_path)
    searches: list[Any] = []
    find = planning_module.find
    monkeypatch.setattr(planning_module, "find", lambda *a: searches.append(a) or find(*a))
    options: dict[str, Any] = {"budget": {"memory_budget": "9MiB"}, "resume": {"resume": False}}.get(change, {})
    module = seeded(Classifier, net=network(depth=7)) if change == "model" else seeded()
    if change == "model":
        module.strict_loading = False
        weights = torch.load(path, weights_only=True)
        weights["state_dict"] = module.state_dict()
        weights["optimizer_states"] = []
        torch.save(weights, path)
    run(tmp_path, module, remat(**options), max_steps=-1, max_epochs=2, fit={"ckpt_path": path})
    assert len(searches) == 1


OTHERS: dict[str, Any] = {
    "memory_budget": "1GiB",
    "batch_size": 4,
    "margin": 0.5,
    "objective": "throughput",
    "max_overhead": 0.0,
    "min_batch_size": 4,
    "max_batch_size": 8,
    "multiple_of": 8,
    "effective_batch_size": 64,
    "include_validation": True,
    "on_infeasible": "minimum",
    "modules": ["net"],
    "compile_stretches": True,
    "gather_bandwidth": 1e9,
}


@pytest.mark.parametrize("name", [field.name for field in fields(Settings)])
def test_a_plan_that_other_settings_made_is_another(name: str) -> None:
    module = torch.nn.Sequential()
    strategy = SimpleNamespace(root_device=torch.device("cpu"), optimizers=[])
    trainer: Any = SimpleNamespace(lightning_module=module, strategy=strategy, precision="32-true", world_size=1)

    def mark(planner: Any = "auto", **options: Any) -> str:
        return fingerprint(trainer, Settings(planner, **options))

    if name in OTHERS:
        assert mark(**{name: OTHERS[name]}) != mark()
    elif name == "planner":
        assert len({mark(planner) for planner in ("auto", "rotor", plan_rotor, plan_dtr)}) == 4
        assert mark(plan_rotor) == mark(plan_rotor)
        nameless = [
            lambda graph, budget_bytes: None,
            lambda graph, budget_bytes: 0,
            partial(plan_rotor),
            partial(plan_dtr),
        ]
        assert len({mark(planner) for planner in nameless}) == 4
        assert [mark(planner) for planner in nameless] == [mark(planner) for planner in nameless]
    else:
        other = {"resume": False, "self_check": False, "on_oom": "replan", "rebatch_fn": len}.get(name, "other")
        assert mark(**{name: other}) == mark()


def test_a_plan_for_another_optimizer_or_module_of_the_model_is_another() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    strategy = SimpleNamespace(root_device=torch.device("cpu"), optimizers=[torch.optim.SGD(module.parameters())])
    trainer: Any = SimpleNamespace(lightning_module=module, strategy=strategy, precision="32-true", world_size=1)
    first = fingerprint(trainer, Settings(modules=[module[0]]))
    assert fingerprint(trainer, Settings(modules=["0"])) == first
    assert fingerprint(trainer, Settings(modules=[module[1]])) != first
    strategy.optimizers = [torch.optim.Adam(module.parameters())]
    assert fingerprint(trainer, Settings(modules=["0"])) != first


@pytest.mark.slow
def test_plan_path_that_holds_something_else_is_told_and_left(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    run(tmp_path, seeded(), remat(plan_path=path), max_steps=1)
    text = path.read_text()
    for broken in ("", text[: len(text) // 2], '{"planner": "auto"}', "[1, 2]", "my notes"):
        path.write_text(broken)
        with pytest.raises(ValueError, match=r"plan_path names .*plan\.json, but the text is no stored result"):
            run(tmp_path, seeded(), remat(plan_path=path), max_steps=1)
        assert path.read_text() == broken


@pytest.mark.slow
def test_a_stored_plan_for_other_inputs_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    first = remat(plan_path=path)
    run(tmp_path, seeded(), first, max_steps=1)
    assert first.result is not None
    state = json.loads(path.read_text())
    step = json.loads(state["step"])
    for plan in step["plans"].values():  # as if the same settings had met images of another size
        ((dtype, shape),) = plan["graph"]["profiled_on"]
        assert shape[0] == first.result.batch_size
        plan["graph"]["profiled_on"] = [(dtype, [shape[0], 2 * shape[1], *shape[2:]])]
    fewer = first.result.batch_size - 1  # what the loaders are given, as the file says, stays as it is
    path.write_text(json.dumps({**state, "step": json.dumps(step), "batch_size": fewer}))
    second, module = remat(plan_path=path), seeded()
    with pytest.warns(UserWarning, match="plans anew: the plan was made for inputs .* and is given"):
        run(tmp_path, module, second, max_steps=1)
    assert second.result is not None
    assert second.result.num_steps
    assert second.result.batch_size == module.sizes[-1] == fewer


@pytest.mark.slow
def test_a_stored_plan_for_what_is_no_single_graph_any_more_is_made_anew(tmp_path: Path) -> None:
    def blocks() -> Classifier:
        layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Sigmoid()) for _ in range(6)]
        return seeded(net=nn.Sequential(nn.Conv2d(3, 8, 1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()))

    path = tmp_path / "plan.json"
    first, second = (remat(plan_path=path, memory_budget="85%", batch_size="keep") for _ in range(2))
    run(tmp_path, blocks(), first, max_steps=1)
    assert first.result is not None
    module = blocks()
    module.net[1][1].momentum = None  # as while weights are averaged: it reads the number of batches
    with pytest.warns(UserWarning, match="plans anew: the plan is for what is not captured any more: .* as one graph"):
        run(tmp_path, module, second, max_steps=1)
    assert second.result is not None
    assert second.result.step.keys != first.result.step.keys
    assert second.result.step.num_recomputed


@pytest.mark.slow
def test_plan_path_is_written_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning_remat.trainer.planning as planning_module

    path = tmp_path / "plan.json"
    first = remat(plan_path=path)
    run(tmp_path, seeded(), first, max_steps=1)
    assert path.exists()
    monkeypatch.setattr(planning_module, "find", lambda *a: pytest.fail("searched again"))
    second = remat(plan_path=path)
    run(tmp_path, seeded(), second, max_steps=1)
    assert first.result is not None
    assert second.result is not None
    assert second.result.plan.schedule == first.result.plan.schedule
