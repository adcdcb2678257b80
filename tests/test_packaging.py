"""What a user installs: the wheel alone, without this repository, and its config group in an app of their own."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from lightning_remat import Rematerialization

ROOT = Path(__file__).parent.parent


def test_the_config_group_serves_an_app_of_the_users(tmp_path):
    (tmp_path / "app.yaml").write_text(
        "defaults:\n  - remat: auto\n  - _self_\nhydra:\n  searchpath: [pkg://lightning_remat.conf]\n"
    )
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("app", overrides=["remat=rotor", "remat.memory_budget=2GiB"])
    callback = instantiate(config.remat)
    assert isinstance(callback, Rematerialization)
    assert (callback.settings.planner, callback.settings.memory_budget) == ("rotor", "2GiB")


@pytest.mark.slow
def test_the_wheel_is_whole_and_imports_without_the_extras(tmp_path):
    source, wheels, site = tmp_path / "source", tmp_path / "wheels", tmp_path / "site"
    source.mkdir()
    shutil.copytree(ROOT / "lightning_remat", source / "lightning_remat")  # building writes beside the sources
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    subprocess.run([*pip, "wheel", "--no-deps", "-w", wheels, source], check=True)
    (wheel,) = wheels.glob("lightning_remat-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {
        str(file.relative_to(source))
        for file in (source / "lightning_remat").rglob("*")
        if file.suffix in (".py", ".yaml", ".typed", ".html", ".css", ".js")
        and "build" not in file.relative_to(source).parts
    }
    assert packed == sources

    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['hydra', 'omegaconf', 'matplotlib', 'torchvision']))\n"
        f"sys.path.insert(0, {str(site)!r})\n"
        "import torch, lightning_remat\n"
        f"assert lightning_remat.__file__.startswith({str(site)!r})\n"
        "net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)))\n"
        "plan = lightning_remat.rematerialize(net, torch.randn(4096, 8), memory_budget='90%', planner='periodic')\n"
        "assert plan.peak_bytes < plan.plain.peak_bytes\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
