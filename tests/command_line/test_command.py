"""`lightning-remat plan`: what it answers, what it writes, and that nonsense gets one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_remat import Plan, measure_peak, rematerialize, restore
from lightning_remat.command_line.command import main

HERE = __name__


def chain(width: int = 32, depth: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = chain()
        self.example_input_array = torch.zeros(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class ReadsValues(nn.Sequential):
    """As a network with drop path does: fake tensors have no values, so it is made of real ones first."""

    def __init__(self) -> None:
        super().__init__(*chain(), nn.Dropout(torch.linspace(0, 0.5, 2)[1].item()))


def broken() -> nn.Module:
    raise RuntimeError("two\nlines")


def number() -> int:
    return 3


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["plan", *arguments, "--planner", "periodic", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_fixed_batch_within_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    told = asked(capsys, f"{HERE}:chain", "--input", "1024x32", "--memory", "70%")
    assert told["measured_peak_bytes"] <= told["budget_bytes"] < told["plain_peak_bytes"]
    assert told["lowest_peak_bytes"] <= told["budget_bytes"]
    assert told["predicted_peak_bytes"] == pytest.approx(told["measured_peak_bytes"], rel=0.01)
    assert told["batch_size"] == 1024
    assert told["parameter_bytes"] == 8 * (32 * 32 + 32) * 4
    peaks = [point["peak_bytes"] for point in told["curve"]]
    assert min(peaks) == told["lowest_peak_bytes"]
    assert sum(told["plain_peak_contents"].values()) == pytest.approx(told["plain_peak_bytes"], rel=0.05)


@pytest.mark.slow
def test_the_prediction_is_that_of_the_real_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    told = asked(capsys, f"{HERE}:chain", "--input", "1024x32", "--memory", "70%", "--save", str(file))
    plan = Plan.from_json(file.read_text())
    module, x = chain(), torch.randn(1024, 32)
    rematerialize(module, x, plan=plan)
    module(x).sum().backward()  # gradients are there from now on, as the command counts them
    with measure_peak(include=[module, x]) as measured:
        module(x).sum().backward()
    restore(module)
    assert measured.peak_bytes <= told["measured_peak_bytes"] * 1.05
    assert measured.peak_bytes < 0.8 * told["plain_peak_bytes"]


@pytest.mark.slow
def test_the_largest_and_the_fastest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    told = asked(capsys, f"{HERE}:chain", "--input", "Bx32", "--memory", "1MiB", "--optimizer", "adamw")
    largest, fastest = told["largest"], told["fastest"]
    assert told["batch_size"] == largest["batch_size"] >= fastest["batch_size"]
    assert largest["samples_per_second"] <= fastest["samples_per_second"]
    assert told["measured_peak_bytes"] <= 2**20 < largest["plain_peak_bytes"]
    assert told["optimizers"] == ["AdamW"]


@pytest.mark.slow
def test_a_lightning_module_brings_its_input_and_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    told = asked(capsys, f"{HERE}:Lit")
    assert (told["batch_size"], told["optimizers"], told["budget_bytes"]) == (64, ["Adam"], None)


@pytest.mark.slow
def test_ddp_counts_its_buckets(capsys: pytest.CaptureFixture[str]) -> None:
    alone = asked(capsys, f"{HERE}:chain", "--input", "64x32")
    together = asked(capsys, f"{HERE}:chain", "--input", "64x32", "--strategy", "ddp", "--world-size", "2")
    assert together["plain_peak_bytes"] - alone["plain_peak_bytes"] == alone["parameter_bytes"]


@pytest.mark.slow
def test_precision_takes_less(capsys: pytest.CaptureFixture[str]) -> None:
    full = asked(capsys, f"{HERE}:chain", "--input", "1024x32")
    half = asked(capsys, f"{HERE}:chain", "--input", "1024x32", "--precision", "bf16-true")
    assert half["plain_peak_bytes"] < 0.55 * full["plain_peak_bytes"]


@pytest.mark.slow
def test_a_device_of_a_data_sheet_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    slow = asked(capsys, f"{HERE}:chain(512, 4)", "--input", "4096x512", "--device", "T4")
    fast = asked(capsys, f"{HERE}:chain(512, 4)", "--input", "4096x512", "--device", "h100")
    assert fast["device"] == "H100"
    assert fast["curve"][-1]["step_seconds"] < slow["curve"][-1]["step_seconds"]
    assert fast["budget_bytes"] == int(80e9 * 0.95)


@pytest.mark.slow
def test_a_model_that_reads_values_while_it_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(capsys, f"{HERE}:ReadsValues", "--input", "64x32")["network"] == "ReadsValues"


@pytest.mark.slow
def test_a_hugging_face_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    told = asked(capsys, str(file), "--input", "4x16", "--memory", "90%")
    assert told["network"] == "GPT2LMHeadModel"
    assert told["inputs"] == ["4×16 int64", "4×16 int64"]
    by_class = asked(
        capsys, "transformers:GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64)", "--input", "4x16"
    )
    assert by_class["network"] == "GPT2LMHeadModel"


@pytest.mark.slow
def test_a_person_reads_a_verdict_a_curve_and_a_line_of_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{HERE}:chain", "--input", "1024x32", "--memory", "1100KiB", "--planner", "periodic"]) == 0
    text = capsys.readouterr().out
    for part in ("It fits into 1.07 MiB", "Plain peak", "activations", "Time over memory", "Rematerialization("):
        assert part in text


@pytest.mark.slow
def test_all_planners_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    told = asked(capsys, f"{HERE}:chain(8, 3)", "--input", "64x8", "--memory", "95%", "--compare")
    assert {attempt["planner"] for attempt in told["compared"]} >= {"auto", "rotor", "periodic"}


@pytest.mark.slow
def test_the_page_holds_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    wanted = ["plan", f"{HERE}:chain", "--input", "1024x32", "--memory", "70%", "--planner", "periodic"]
    assert main([*wanted, "--report", str(file)]) == 0
    assert "of 1024 samples in" in file.read_text(encoding="utf-8")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("arguments", "part", "code"),
    [
        (["{}:chain", "--input", "64x32", "--memory", "1KiB"], "the lowest peak is", 1),
        (["{}:chain", "--input", "64x32", "--memory", "1parsec"], "--memory is '1parsec'", 2),
        (["{}:chain", "--input", "64xx32"], "--input is '64xx32'", 2),
        (["{}:chain", "--input", "0x32"], "at least 1", 2),
        (["{}:chain", "--input", "Bx32"], "--memory 80GB or --device", 2),
        (["{}:chain", "--input", "Bx32", "--memory", "50%"], "give bytes", 2),
        (["{}:chain", "--input", "64x5"], "Sequential does not take 64×5 float32", 2),
        (["{}:chain"], "give --input", 2),
        (["{}:chain", "--input", "64x32", "--device", "abacus"], "the devices are", 2),
        (["{}:chain", "--input", "64x32", "--strategy", "fsdp2", "--world-size", "0"], "at least 1", 2),
        (["{}:chain", "--input", "64x32", "--world-size", "8"], "--strategy ddp", 2),
        (["{}:chain", "--input", "64x32", "--save", "no/such/folder/plan.json"], "no folder", 2),
        (["{}:broken", "--input", "64x32"], "RuntimeError: two lines", 2),
        (["{}:number", "--input", "64x32"], "made a int", 2),
        (["{}:nothing", "--input", "64x32"], "has no 'nothing'", 2),
        (["no_such_package:net", "--input", "64x32"], "no module 'no_such_package'", 2),
        (["{}:chain(width=print)", "--input", "64x32"], "plain values", 2),
        (["chain", "--input", "64x32"], "package.module:callable", 2),
        (["{}:chain", "--input", "64x32", "--planner", "best"], "invalid choice", 2),
        ([], "target", 2),
    ],
)
def test_a_refusal_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], part: str, code: int) -> None:
    planner = [] if "--planner" in arguments else ["--planner", "periodic"]
    assert main(["plan", *(a.format(HERE) for a in arguments), *planner]) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert part.lower() in told.err.lower()
    assert len(told.err.strip().splitlines()) == 1


@pytest.mark.slow
def test_it_runs_as_a_module_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef net():\n    print('hello')\n    return nn.Linear(4, 4)\n"
    )
    command = [sys.executable, "-m", "lightning_remat", "plan", "mine:net", "--input", "8x4", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["network"] == "Linear"
