"""A run resumed from a Lightning checkpoint goes on with the stored plan and batch size, at the right epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from remat_runs import Classifier, network, run, seeded

from lightning_remat import Rematerialization

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
    path.write_text(json.dumps({**state, "step": json.dumps(step)}))
    second = remat(plan_path=path)
    with pytest.warns(UserWarning, match="plans anew: the plan was made for inputs .* and is given"):
        run(tmp_path, seeded(), second, max_steps=1)
    assert second.result is not None
    assert second.result.num_steps
    assert second.result.batch_size == first.result.batch_size


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
