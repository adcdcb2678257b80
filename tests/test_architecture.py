"""The imports run one way: a file imports from its own room and from those before it; Lightning stays in the last.

A room is a folder of the package, or a file that lies beside them: a new file is in a room by where it lies. Imports
for type checkers count.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_remat"
FILES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES} - {PACKAGE})
ROOMS = (
    "budget", "errors", "schedules", "lowering", "chain", "planners", "plans", "devices", "module_state", "measure",
    "operations", "capture", "profiling", "execution", "regions", "reports", "batch_search", "trainer", "command_line",
)  # fmt: skip
WITHOUT_ORDER = {"__init__", "__main__", "conf"}  # the façades, which import every room, and YAML, which imports none
PURE = set(ROOMS[: ROOMS.index("devices")])
TORCH_ALONE = set(ROOMS[ROOMS.index("devices") : ROOMS.index("reports")])
FRAMEWORKS = {"torch", "lightning", "lightning_utilities", "hydra", "omegaconf", "matplotlib", "torchvision"}
UPWARD: dict[str, str] = {}  # what still imports from a later room


def named(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def file_of(module: Path) -> Path | None:
    """The file that `import` runs for a module of the package, given as a path without suffix."""
    return next((f for f in (module.with_suffix(".py"), module / "__init__.py") if f.is_file()), None)


@cache
def frameworks(path: Path) -> frozenset[str]:
    """First names of the absolute imports of a file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    assert "lightning_remat" not in found, "the package imports itself by relative imports"
    return frozenset(found)


@cache
def own_imports(path: Path) -> frozenset[Path]:
    """The files of the package that a file imports from; the `__init__.py` of the folders they lie in are no part."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for alias in node.names:
                target = file_of(module / alias.name) or file_of(module)
                assert target, f"{named(path)} imports {alias.name} from {module}, where no file is"
                found.add(target)
    return frozenset(found)


def parameters(paths: Iterable[Path], known: Mapping[str, str] = MappingProxyType({})) -> list[object]:
    """Files as parameters; those that are known to break a rule must go on to break it, or leave the list."""
    marks = {name: [pytest.mark.xfail(reason=f"imports {other}", strict=True)] for name, other in known.items()}
    return [pytest.param(path, id=named(path), marks=marks.get(named(path), [])) for path in paths]


ORDERED = [path for path in FILES if room_of(path) not in WITHOUT_ORDER]


def test_every_folder_is_a_room() -> None:
    assert {room_of(path) for path in ORDERED} == set(ROOMS)


def test_few_files_lie_beside_the_rooms() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 12


@pytest.mark.sampled
@pytest.mark.parametrize("path", parameters(ORDERED, UPWARD))
def test_a_file_imports_from_rooms_before_its_own(path: Path) -> None:
    before = ROOMS[: ROOMS.index(room_of(path)) + 1]
    later = sorted(named(other) for other in own_imports(path) if room_of(other) not in before)
    assert not later, f"{named(path)} imports {', '.join(later)}"


@pytest.mark.parametrize("path", parameters(ORDERED))
def test_no_file_imports_itself_through_others(path: Path) -> None:
    """Within a room: the order of the rooms leaves no circle between two of them."""
    seen = reached({path})
    assert path not in seen, f"{named(path)} imports itself through {', '.join(map(named, own_imports(path) & seen))}"


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f.parent != PACKAGE], ids=lambda f: f.name)
def test_no_folder_within_a_room_imports_itself_through_others(folder: Path) -> None:
    """A method's file imports its engine's folder, which imports no file that imports the engine."""
    files = set(folder.glob("*.py"))
    outside = {other for path in files for other in own_imports(path) if room_of(other) == room_of(path)} - files
    back = reached(outside) & files
    assert not back, f"{folder.name} imports itself through {', '.join(map(named, outside))}"


def reached(paths: set[Path]) -> set[Path]:
    """The files of the same room that files import, and those that these import, and so on."""
    seen: set[Path] = set()
    ahead = list(paths)
    while ahead:
        path = ahead.pop()
        found = {other for other in own_imports(path) if room_of(other) == room_of(path)} - seen
        seen |= found
        ahead.extend(found)
    return seen


@pytest.mark.parametrize("path", parameters(path for path in FILES if room_of(path) in PURE))
def test_the_pure_half_knows_no_framework(path: Path) -> None:
    assert not frameworks(path) & FRAMEWORKS


@pytest.mark.parametrize("path", parameters(path for path in FILES if room_of(path) in TORCH_ALONE))
def test_the_torch_half_knows_no_planner_and_torch_alone(path: Path) -> None:
    assert not frameworks(path) & (FRAMEWORKS - {"torch"})
    assert "planners" not in {room_of(other) for other in own_imports(path)}


@pytest.mark.parametrize("path", parameters(path for path in FILES if room_of(path) != "trainer"))
def test_lightning_stays_in_its_room(path: Path) -> None:
    assert not frameworks(path) & {"lightning", "lightning_utilities"}


KINDS = {"cuda", "hip", "xpu", "mps", "mtia"}


@pytest.mark.sampled
@pytest.mark.parametrize("path", parameters(path for path in FILES if room_of(path) != "devices"))
def test_one_file_speaks_to_devices(path: Path) -> None:
    """The others ask it, so that no line of the package is for one kind of device."""
    named_kinds: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
            named_kinds += [node.attr] if node.attr in {*KINDS, "accelerator", "get_device_module"} else []
        elif isinstance(node, ast.Constant) and node.value in KINDS:
            named_kinds.append(str(node.value))
    assert not named_kinds, f"{named(path)} names {', '.join(named_kinds)}"


@pytest.mark.parametrize("path", parameters(FILES))
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


@pytest.mark.slow
def test_the_package_imports_on_systems_other_than_unix() -> None:
    """`psutil` has what it needs of each system; on this one it needs what is taken away from the package."""
    code = "import sys, psutil; sys.modules['resource'] = None; from lightning_remat import Rematerialization"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_planners_import_without_torch() -> None:
    """`import lightning_remat.planners` alone must not need torch; the package's own names do."""
    code = (
        "import sys, types; package = types.ModuleType('lightning_remat'); "
        f"package.__path__ = [{str(PACKAGE)!r}]; sys.modules['lightning_remat'] = package; "
        "import lightning_remat.plans.planner; assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
