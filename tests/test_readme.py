"""The README's snippets run, and its commands are those that CI runs."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from remat_runs import Classifier, Images

from lightning_remat.command_line.request import parse_request

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.slow
def test_the_plain_pytorch_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = [s for s in SNIPPETS if "rematerialize(model" in s]
    names: dict[str, object] = {}
    torch.manual_seed(0)
    exec(snippet, names)
    peak, plain, overhead = capsys.readouterr().out.split()
    assert int(peak) <= 0.6 * int(plain)
    assert 0 < float(overhead) < 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning, about the tiny run
def test_the_lightning_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snippet,) = [s for s in SNIPPETS if "Trainer(" in s]
    monkeypatch.chdir(tmp_path)
    short = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    monkeypatch.setattr("lightning.pytorch.Trainer", partial(Trainer, **short, enable_progress_bar=False))
    data = LightningDataModule.from_datasets(Images(16), Images(8), batch_size=8)
    exec(snippet, {"model": Classifier(), "data": data})


def test_there_are_exactly_two_commands() -> None:
    commands = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    assert len(commands) == 2
    assert "recipes/train.py" in commands[0]
    assert commands[1].strip().endswith("pytest -n 2")


def test_what_it_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)", README)
    assert len(links) > 10
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]


def test_every_example_has_a_row() -> None:
    examples = {file.name for file in (ROOT / "recipes" / "examples").glob("*.py")} - {"lightning_cli.py"}
    assert {name for name in examples if f"(recipes/examples/{name})" in README} == examples


def test_the_command_that_it_shows_is_one() -> None:
    (line,) = re.findall(r"^\$ lightning-remat (.*)$", README, re.MULTILINE)
    asked = parse_request(line.split())
    assert (asked.target, asked.memory, asked.inputs[0].batch_size) == ("torchvision.models:resnet50", "4GiB", 96)
