"""The imports run one way: the pure half knows no torch, Lightning stays on the callback's side, Hydra in recipes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_remat"
FILES = sorted(PACKAGE.rglob("*.py"))
PURE_HALF = {
    "allocation", "budget", "chain", "chain_steps", "compiled", "errors", "explanation", "graph", "graph_arrays",
    "lifetimes", "lowering", "planner", "planners", "region_options", "schedule", "simulator", "stage_lowering",
    "stages", "step_memory", "step_planner",
}  # fmt: skip
TORCH_HALF = {
    "ambient", "arguments", "capture", "conditions", "constants", "contexts", "cost_model", "decisions",
    "device_memory", "evaluation", "example_values", "executor", "factories", "fingerprint", "footprint", "fusion",
    "gradient_layouts", "gradient_owners", "gradient_probe", "hooks", "meter", "nested", "out_of_memory",
    "out_of_place", "plain_tensors", "preserve", "profiler", "program", "proxies", "python_state", "random_state",
    "recording", "refusals", "region_rewriter", "region_search", "regions", "rematerializer", "resident_memory",
    "rewriter", "returned_inputs", "saved_tensors", "self_check", "step_run", "stopwatch", "tensor_bytes", "tracer",
    "watch",
}  # fmt: skip
FRAMEWORKS = {"torch", "lightning", "hydra", "omegaconf", "matplotlib", "torchvision"}


def imports(path: Path) -> set[str]:
    """Top-level names of absolute imports, and dotted names of our own modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                found.add((node.module or "").split(".")[0])
            else:
                package = path.relative_to(PACKAGE).parts[: -node.level]
                base = ".".join((*package, *filter(None, [node.module])))
                found |= {f"lightning_remat.{base}".rstrip(".")}
                if not node.module:
                    found |= {".".join(filter(None, ["lightning_remat", *package, a.name])) for a in node.names}
    return found


def module_name(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def files_of(half: set[str]) -> list[object]:
    return [pytest.param(p, id=str(p.relative_to(PACKAGE))) for p in FILES if module_name(p) in half]


def own_imports(path: Path) -> set[str]:
    """The first names below the package of what a file imports from it."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("lightning_remat.")}


@pytest.mark.parametrize("path", files_of(PURE_HALF))
def test_the_pure_half_knows_no_framework(path: Path) -> None:
    assert not imports(path) & FRAMEWORKS
    assert own_imports(path) <= PURE_HALF


@pytest.mark.parametrize("path", files_of(TORCH_HALF))
def test_the_torch_half_knows_no_planner_and_no_lightning(path: Path) -> None:
    assert not imports(path) & (FRAMEWORKS - {"torch"})
    assert own_imports(path) <= (PURE_HALF | TORCH_HALF) - {"planners"}


@pytest.mark.parametrize("path", files_of({module_name(p) for p in FILES} - {"callback", "trainer"}))
def test_lightning_stays_with_the_callback(path: Path) -> None:
    assert not imports(path) & {"lightning", "lightning_utilities"}


@pytest.mark.parametrize("path", files_of({module_name(p) for p in FILES}))
def test_files_hold_one_concept(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("rematerialize", ["hydra", "omegaconf", "torchvision", "matplotlib", "lightning"]),
        ("Rematerialization", ["hydra", "omegaconf"]),  # torchmetrics itself asks for the others if they are there
    ],
)
def test_the_package_imports_without_the_extras(name: str, absent: list[str]) -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import lightning_remat; lightning_remat.{name}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_planners_import_without_torch() -> None:
    """`import lightning_remat.planners` alone must not need torch; the package's own names do."""
    code = (
        "import sys, types; package = types.ModuleType('lightning_remat'); "
        f"package.__path__ = [{str(PACKAGE)!r}]; sys.modules['lightning_remat'] = package; "
        "import lightning_remat.planner; assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
