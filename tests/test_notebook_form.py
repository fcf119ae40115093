"""notebooks/pretrain.ipynb as a file; tests/integration/test_notebook.py runs it."""

import ast
import importlib
import re

import nbformat
import pytest
from conftest import REPOSITORY

NOTEBOOK = nbformat.read(REPOSITORY / "notebooks" / "pretrain.ipynb", as_version=4)
CODE = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]
TEXT = "\n".join(cell.source for cell in NOTEBOOK.cells if cell.cell_type == "markdown")
PROGRAM = "train_pretrain_accelerate"
IN_A_RUN = {"metrics.jsonl", "report.html"}


def flags_in(cell) -> set[str]:
    """Every string in the code of a cell that is a flag."""
    nodes = ast.walk(ast.parse(cell.source))
    words = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return {w for w in words if isinstance(w, str) and re.fullmatch(r"--\w+", w)}


def programs_of(cell) -> list[str]:
    """The modules whose `main` the cell calls."""
    scripts = re.findall(r"from scripts import (\w+)", cell.source)
    trains = f"from {PROGRAM} import main" in cell.source
    return [f"scripts.{name}" for name in scripts] + [PROGRAM] * trains


def module_of(command: str) -> str:
    """The module that a command starts in the end."""
    words = command.split()
    if words[:2] == ["bash", "run_accelerate.sh"]:
        return PROGRAM
    return words[2] if words[1] == "-m" else words[1].removesuffix(".py")


def test_the_notebook_is_valid_and_comes_without_outputs():
    assert list(nbformat.validator.iter_validate(NOTEBOOK)) == []
    assert [cell.id for cell in CODE if cell.outputs or cell.execution_count is not None] == []
    tagged = [cell for cell in CODE if "parameters" in cell.metadata.get("tags", [])]
    assert tagged == [CODE[0]]


def test_programs_flags_and_files_are_there_as_code_and_text_name_them(capsys):
    def help_of(module: str) -> str:
        with pytest.raises(SystemExit):
            importlib.import_module(module).main(["--help"])
        return capsys.readouterr().out

    commands = re.findall(r"`((?:python|bash) [^`]+)`", TEXT)
    in_text = {module_of(command) for command in commands}
    called = {program for cell in CODE for program in programs_of(cell)}
    assert len(called) == 4
    assert called - {PROGRAM} <= in_text  # a command for everything that the code calls
    helps = {module: set(re.findall(r"--\w+", help_of(module))) for module in called | in_text}
    for cell in CODE:
        assert flags_in(cell) <= set().union(*(helps[name] for name in programs_of(cell)))
    assert set(re.findall(r"--\w+", TEXT)) <= set().union(*helps.values())
    assert sum(len(flags_in(cell)) for cell in CODE) > 18
    files = set(re.findall(r"`([\w/]+(?:\.\w+|/))`", TEXT)) - IN_A_RUN
    assert {"README.md", "model/"} <= files
    assert [name for name in files if not (REPOSITORY / name).exists()] == []
