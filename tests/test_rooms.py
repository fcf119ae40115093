"""A room is a folder, in most cases within lm/, or train_*.py together. No room imports from a
higher one."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

# From the lowest room to the highest. docs/architecture.md describes them.
ROOMS = (
    *("common", "model", "data", "formats", "inference", "storage", "report", "engine"),
    *("training", "train", "launch", "evaluation", "scripts", "benchmarks"),
)
# Room → the only rooms from which it may import.
MAY_IMPORT = {"common": {"common"}, "model": {"model"}, "data": {"common", "model", "data"}}
MAY_IMPORT["evaluation"] = {*ROOMS} - {"training", "train", "launch"}
# Programs that must start fast load these modules. Importing torch would take seconds.
LIGHT = ("common.atomic", "data.prepare", "storage.folder", "storage.find", "report.page")


def room_of(module: str) -> str | None:
    """Return the room of a module of this project; None for a library's module."""
    parts = module.removeprefix("lm.").split(".")
    if parts[0].startswith("train_"):
        return "train"
    return parts[0] if parts[0] in ROOMS else None


def sources() -> dict[str, Path]:
    """Return the file of each module outside tests/."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.py"]
    listed = subprocess.check_output(command, cwd=REPOSITORY, text=True)
    names = {name for name in listed.split() if not name.startswith("tests/")}
    names.remove("lm/__init__.py")  # it has no code, and lies above the rooms
    files = {name[:-3].replace("/", "."): REPOSITORY / name for name in names}
    return {module: path for module, path in files.items() if path.exists()}


def imports(path: Path) -> set[str]:
    """Return the dotted names that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def test_every_import_is_from_the_same_room_or_a_lower_one():
    upward = []
    for name, path in sources().items():
        here = room_of(name)
        allowed = {*ROOMS[: ROOMS.index(here) + 1]} & {*MAY_IMPORT.get(here, ROOMS)}
        for module in imports(path):
            if (there := room_of(module)) and there not in allowed:
                upward.append(f"{name} imports {module}")
    assert upward == []


def test_no_two_files_import_each_other_not_even_for_type_checking():
    used = {module: imports(path) for module, path in sources().items()}
    pairs = {(a, b) for a in used for name in used[a] for b in (name, name.rpartition(".")[0])}
    assert {(a, b) for a, b in pairs if a < b and (b, a) in pairs} == set()


@pytest.mark.parametrize("room", sorted({*ROOMS} - {"train"}))
def test_the_docs_name_every_room_that_is_a_folder(room):
    folder = f"lm/{room}" if (REPOSITORY / "lm" / room).is_dir() else room
    assert f"| `{folder}/` |" in (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")


def test_no_python_file_outside_tests_is_longer_than_350_lines():
    lengths = {name: len(path.read_text().splitlines()) for name, path in sources().items()}
    assert {name: n for name, n in lengths.items() if n > 350} == {}


def test_light_modules_do_not_import_torch():
    code = f"import sys, lm.{', lm.'.join(LIGHT)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
