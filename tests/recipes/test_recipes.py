"""Every recipe runs as a user would run it, at toy size, and its config is one that Hydra can compose."""

import copy
import csv
import json
from pathlib import Path

import plan
import pytest
import torch
import train
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image
from torch._subclasses import FakeTensorMode

import lightning_remat.conf
from lightning_remat import PLANNERS, Plan, rematerialize
from remat_recipes.modules.classification import Classification
from remat_recipes.modules.outputs import main_and_auxiliary
from remat_recipes.modules.segmentation import middle, pixel_loss

CONF = Path(__file__).parents[2] / "conf"
REMAT = Path(lightning_remat.conf.__file__).parent / "remat"
EXPERIMENTS = sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))
MODELS = sorted(file.stem for file in (CONF / "model").glob("*.yaml"))

# Lightning 2.6 reads a class that torch has deprecated since; it also says where its own loggers could be better.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*Experiment logs directory.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*number of training batches.*smaller than the logging interval.*"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning"),
    pytest.mark.filterwarnings("ignore:Rematerialization plans the lowest peak"),
]

TINY_TRAINER = (
    "trainer=cpu",
    "+trainer.enable_progress_bar=false",
    "+trainer.enable_model_summary=false",
    "+trainer.limit_train_batches=2",
    "+trainer.limit_val_batches=1",
    "+trainer.limit_test_batches=1",
    "max_epochs=1",
)


def composed(name, *overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def trained(folder, *overrides):
    config = composed("train", f"output_dir={folder}", *TINY_TRAINER, *overrides)
    return train.main.__wrapped__(config)


TINY_EXPERIMENTS = {
    "digits": ("data.image_size=16", "data.batch_size=8"),
    "batch_size_scaling": ("data.image_size=16", "data.batch_size=4", "remat.max_batch_size=8"),
    "unet_scenes": ("model.width=4", "data.image_size=32", "data.batch_size=2", "remat.memory_budget=1GiB"),
    "pspnet_scenes": ("model.width=4", "model.layers=[1,1,1,1]", "data.image_size=33", "data.batch_size=2"),
    "lstm_text": ("num_steps=4", "model.hidden_size=8", "data.batch_size=2"),
    "lstm_chen2016": ("num_steps=4", "model.hidden_size=8", "data.batch_size=2", "num_classes=50"),
    "gpt_text": ("num_steps=8", "model.width=8", "model.num_blocks=2", "data.batch_size=2", "remat.memory_budget=1GiB"),
    "resnet1001_digits": ("model.depth=20", "data.image_size=16", "data.batch_size=4"),
    "resnet50_cifar10": (
        "data=synthetic", "model=resnet18", "~data.image_size", "num_classes=3", "data.input_shape=[3,32,32]",
        "data.num_samples=8", "data.batch_size=2", "remat.effective_batch_size=4", "remat.max_batch_size=2",
        "remat.memory_budget=4GiB",
    ),
    "unet_oxford_pet": (
        "data=synthetic", "module=segmentation", "data.target=pixels", "num_classes=3", "data.input_shape=[3,32,32]",
        "data.num_samples=8", "data.batch_size=2", "model.width=4",
    ),
    "pspnet_voc": (
        "data=synthetic", "module=segmentation", "data.target=pixels", "num_classes=3", "data.input_shape=[3,33,33]",
        "~data.image_size", "data.num_samples=8", "data.batch_size=2", "model.width=4", "model.layers=[1,1,1,1]",
    ),
}  # fmt: skip
LOWEST = ("remat.on_infeasible=minimum",)  # at toy size parameters are most of the memory: half is out of reach


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_runs_at_toy_size(name, tmp_path):
    budget = () if name in ("batch_size_scaling", "resnet50_cifar10") else LOWEST
    metrics = trained(tmp_path, f"experiment={name}", "remat=periodic", *TINY_EXPERIMENTS[name], *budget)
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    assert any(name.startswith("test/") and name != "test/loss" for name in metrics)
    assert (tmp_path / "training.png").stat().st_size > 1000
    assert list(tmp_path.glob("**/remat_report.json"))


@pytest.mark.sampled
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_composes_with_its_remat_and_without(name):
    assert composed("train", f"experiment={name}", "output_dir=x").remat.planner in (*PLANNERS, "auto")
    plain = composed("train", f"experiment={name}", "output_dir=x", "remat=off")
    assert plain.remat.planner is None
    OmegaConf.to_container(plain, resolve=True)


@pytest.mark.slow
def test_run_resumes_where_it_broke(tmp_path, monkeypatch):
    tiny = ("remat=off", "data.image_size=16", "data.batch_size=64", "model.layers=[1,1,1,1]", "max_epochs=2")
    trained(tmp_path / "whole", *tiny)

    def power_cut(module):
        if module.current_epoch == 1:
            raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(Classification, "on_train_epoch_start", power_cut)
        with pytest.raises(RuntimeError, match="power cut"):
            trained(tmp_path / "broken", *tiny)
    whole, broken = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "broken")
    assert (whole["global_step"], broken["global_step"]) == (4, 2)

    (path,) = (tmp_path / "broken").glob("**/*.ckpt")
    with path.with_name("resume.ckpt").open("wb") as copy:  # an equals sign is Hydra's, and checkpoints have some
        copy.write(path.read_bytes())
    trained(tmp_path / "rest", *tiny, f"ckpt_path={path.with_name('resume.ckpt')}")
    rest = checkpoint(tmp_path / "rest")
    assert (rest["global_step"], rest["epoch"]) == (4, whole["epoch"])
    assert rest["lr_schedulers"] == whole["lr_schedulers"]


def checkpoint(folder):
    (path,) = folder.glob("**/*.ckpt")
    return torch.load(path, weights_only=True)


@pytest.mark.slow
def test_same_seed_same_run(tmp_path):
    tiny = ("remat=off", "data.image_size=16", "data.batch_size=32", "model.layers=[1,1,1,1]")
    first, again = (trained(tmp_path / name, *tiny) for name in ("first", "again"))
    other = trained(tmp_path / "other", *tiny, "seed=1")
    assert first == again
    assert first != other


def test_every_planner_has_a_config():
    choices = {file.stem for file in REMAT.glob("*.yaml")} - {"off"}
    assert set(PLANNERS) <= choices
    for name in choices:
        planner = OmegaConf.load(REMAT / f"{name}.yaml").planner
        assert planner == name


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_model_config_builds_the_network_for_its_published_input(name):
    config = composed("plan", f"model={name}", "batch_size=2", "output_dir=x")
    with FakeTensorMode():  # as plan.py does: no initialization may ask for a value
        network = instantiate(config.model, _convert_="all")
        batch = plan.example(2, tuple(config.input_shape), config.num_classes)
        logits, _ = main_and_auxiliary(network(batch))
    assert logits.shape[0] == 2
    assert config.num_classes in logits.shape[1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(file.stem for file in (CONF / "reduced").glob("*.yaml")))
def test_reduced_networks_are_smaller(name):
    if name == "none":
        assert composed("train", "model=unet", "reduced=none", "output_dir=x").model.width == 64
        return
    data = {"unet": "scenes", "pspnet": "scenes", "lstm": "text", "gpt": "text"}.get(name, "digits")
    sizes = []
    for choice in (name, "none"):
        config = composed("train", f"model={name}", f"data={data}", f"reduced={choice}", "output_dir=x")
        with torch.device("meta"):
            sizes.append(sum(p.numel() for p in instantiate(config.model, _convert_="all").parameters()))
    assert sizes[0] < sizes[1] / 5


def assert_plan_runs(config, found):
    """The plan, made on fake tensors and read from its file, runs on real ones with equal gradients."""
    torch.manual_seed(0)
    plain = instantiate(config.model, _convert_="all")
    ours = copy.deepcopy(plain)
    batch = plan.example(config.batch_size, tuple(config.input_shape), config.num_classes)
    assert rematerialize(ours, batch, plan=found) is found
    for network in (plain, ours):
        torch.manual_seed(1)
        network(batch).square().sum().backward()
    gradients = zip(plain.parameters(), ours.parameters(), strict=True)
    assert all(torch.equal(ours.grad, plain.grad) for ours, plain in gradients)


@pytest.mark.slow
def test_plan_writes_table_curves_timelines_and_plans(tmp_path, capsys):
    config = composed(
        "plan", "model=resnet_digits", "input_shape=[3,32,32]", "num_classes=10", "batch_size=64", "remat=periodic",
        "budget=75%", "num_budgets=4", f"output_dir={tmp_path}",
    )  # fmt: skip
    plan.main.__wrapped__(config)
    printed = capsys.readouterr().out
    assert "keep_all" in printed
    assert "periodic" in printed
    found = Plan.from_json((tmp_path / "plan_periodic.json").read_text())
    assert found.peak_bytes <= found.budget_bytes
    assert found.num_recomputed > 0
    assert_plan_runs(config, found)
    rows = list(csv.DictReader((tmp_path / "trade_off.csv").read_text().splitlines()))
    assert {row["planner"] for row in rows} == {"keep_all", "periodic"}
    for row in rows:
        if row["peak_bytes"] and row["budget_bytes"]:
            assert int(row["peak_bytes"]) <= int(row["budget_bytes"])
    floors = {int(row["floor_bytes"]) for row in rows if row["floor_bytes"]}
    reached = {int(row["peak_bytes"]) for row in rows if row["peak_bytes"]}
    assert floors <= reached, "the curve ends exactly at the floor that the planner names"
    assert json.loads((tmp_path / "graph.json").read_text())
    for name in ("trade_off.png", "timeline.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.width > 500


@pytest.mark.slow
def test_plan_explains_what_auto_keeps_and_what_more_memory_would_buy(tmp_path, capsys):
    config = composed(
        "plan", "model=resnet_digits", "input_shape=[3,32,32]", "num_classes=10", "batch_size=64", "remat=auto",
        "budget=50%", "num_budgets=2", f"output_dir={tmp_path}",
    )  # fmt: skip
    plan.main.__wrapped__(config)
    printed = capsys.readouterr().out
    for said in ("recomputes", "above the optimum", "more would save", "knee of the trade-off", "no schedule fits"):
        assert said in printed


def test_pixel_loss_sees_the_middle_of_the_labels_and_weighs_auxiliary_heads():
    torch.manual_seed(0)
    labels = torch.randint(3, (2, 8, 10))
    inner = labels[:, 2:6, 3:7]
    logits, other = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    assert torch.equal(middle(labels, logits), inner)
    expected = torch.nn.functional.cross_entropy(logits, inner)
    assert torch.equal(pixel_loss(logits, labels, 0.4), expected)
    both = expected + 0.4 * torch.nn.functional.cross_entropy(other, inner)
    torch.testing.assert_close(pixel_loss((logits, other), labels, 0.4), both)
    void = torch.where(labels == 0, 255, labels)
    kept = inner != 0
    per_pixel = torch.nn.functional.cross_entropy(logits, inner, reduction="none")
    torch.testing.assert_close(pixel_loss(logits, void, 0.4), per_pixel[kept].mean())


def test_loss_inside_the_region_is_the_same_loss():
    config = composed("train", "model=pspnet", "data=scenes", "model.width=4", "output_dir=x")
    torch.manual_seed(0)
    outside = instantiate(config.module, _convert_="all")
    torch.manual_seed(0)
    inside = instantiate(config.module, loss_inside=True, _convert_="all")
    images, labels = torch.randn(2, 3, 33, 33), torch.randint(4, (2, 33, 33))
    losses = []
    for module in (outside, inside):
        torch.manual_seed(1)
        module.log = lambda *args, **kwargs: None
        losses.append(module.training_step((images, labels), 0))
    assert torch.equal(*losses)
    assert torch.equal(outside.eval()(images), inside.eval()(images))
