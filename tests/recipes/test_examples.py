"""Every example runs as it stands, and does what it says."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "recipes" / "examples"

# Of Lightning, about tiny runs, and of what it reads of torch.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)


def example(name: str) -> ModuleType:
    module = import_module(name)
    assert module.__file__ == str(EXAMPLES / f"{name}.py")
    return module


def test_each_has_a_test() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {file.stem for file in EXAMPLES.glob("*.py")} <= tested


@pytest.mark.slow
def test_plain_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("plain_pytorch").main(num_steps=3) < 1
    before, after = (float(word) for word in capsys.readouterr().out.split()[:4] if word.replace(".", "").isdigit())
    assert after <= 0.6 * before


@pytest.mark.slow
def test_lightning_module() -> None:
    assert example("lightning_module").main("24MiB") > 16


@pytest.mark.slow
def test_lightning_cli() -> None:
    pytest.importorskip("jsonargparse")
    options = ["--config", str(EXAMPLES / "lightning_cli.yaml"), "--data.count", "64"]
    (remat,) = [c for c in example("lightning_cli").main(["fit", *options]).trainer.callbacks if hasattr(c, "result")]
    assert remat.result.step.num_recomputed > 0
    assert remat.result.measured_peak_bytes <= remat.result.budget_bytes


@pytest.mark.slow
def test_hugging_face() -> None:
    pytest.importorskip("transformers")
    result = example("hugging_face").main(max_steps=1).result
    assert result.step.num_recomputed > 0
    assert result.measured_peak_bytes <= result.budget_bytes


@pytest.mark.slow
def test_fabric() -> None:
    assert example("fabric").main(num_steps=1) > 64


@pytest.mark.slow
def test_segmentation() -> None:
    result = example("segmentation").main(max_steps=1).result
    assert result.step.num_recomputed > 0
    assert result.measured_peak_bytes <= result.budget_bytes
