"""notebooks/pretrain.ipynb as a file; tests/integration/test_notebook.py runs it."""

import ast
import importlib
import re

import nbformat
import pytest
from conftest import REPOSITORY

NOTEBOOK = nbformat.read(REPOSITORY / "notebooks" / "pretrain.ipynb", as_version=4)
CODE = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]
TEXT = [cell.source for cell in NOTEBOOK.cells if cell.cell_type == "markdown"]
PROGRAM = "train_pretrain_accelerate"


def words_of(cell) -> set[str]:
    """Every string in the code of a cell."""
    return {node.value for node in ast.walk(ast.parse(cell.source)) if is_text(node)}


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def programs_of(cell) -> list[str]:
    """The modules whose `main` the cell calls."""
    scripts = re.findall(r"from scripts import (\w+)", cell.source)
    trains = f"from {PROGRAM} import main" in cell.source
    return [f"scripts.{name}" for name in scripts] + [PROGRAM] * trains


def commands_in(text: str) -> list[str]:
    return re.findall(r"`((?:python|bash) [^`]+)`", text)


def module_of(command: str) -> str:
    """The module that a command starts in the end."""
    words = command.split()
    if words[:2] == ["bash", "run_accelerate.sh"]:
        return PROGRAM
    return words[2] if words[1] == "-m" else words[1].removesuffix(".py")


@pytest.fixture
def help_of(capsys):
    def ask(module: str) -> str:
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module).main(["--help"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    return ask


def knows(help_text: str, flag: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", help_text) is not None


def test_the_notebook_is_valid():
    assert list(nbformat.validator.iter_validate(NOTEBOOK)) == []


def test_the_notebook_comes_without_outputs():
    assert [cell.id for cell in CODE if cell.outputs or cell.execution_count is not None] == []


def test_the_parameters_come_before_all_other_code():
    tagged = [cell for cell in CODE if "parameters" in cell.metadata.get("tags", [])]
    assert tagged == [CODE[0]]


def test_every_flag_in_the_code_belongs_to_the_program_that_gets_it(help_of):
    given = {cell.id: {w for w in words_of(cell) if re.fullmatch(r"--\w+", w)} for cell in CODE}
    for cell in CODE:
        known = [help_of(program) for program in programs_of(cell)]
        assert [f for f in given[cell.id] if not any(knows(text, f) for text in known)] == []
    assert len(given["text"]) == 3
    assert len(given["train"]) > 15


def test_every_command_in_the_text_can_be_given_with_its_flags(help_of):
    for text in TEXT:
        known = [help_of(module_of(command)) for command in commands_in(text)]
        flags = set(re.findall(r"--\w+", text))
        assert [f for f in flags if not any(knows(text, f) for text in known)] == []


def test_the_text_names_a_command_for_every_program_that_the_code_calls():
    called = {program for cell in CODE for program in programs_of(cell)} - {PROGRAM}
    named = {module_of(command) for text in TEXT for command in commands_in(text)}
    assert len(called) == 3
    assert called <= named


def test_every_file_named_in_the_text_is_there():
    named = {n for t in TEXT for n in re.findall(r"`([\w/]+(?:\.\w+|/))`", t)}
    named -= {"metrics.jsonl", "report.html"}  # in the run folder
    assert {"README.md", "model/"} <= named
    assert [name for name in named if not (REPOSITORY / name).exists()] == []
