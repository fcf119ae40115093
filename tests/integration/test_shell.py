"""run_accelerate.sh from a fresh clone, with the environment that runs these tests."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import Finished, copy_repository, run

pytestmark = pytest.mark.slow

# Everything the script and the libraries call, besides Python; no compiler and no ninja among it.
TOOLS = ("bash", "sh", "dirname", "basename", "env", "cat", "uname", "rm", "sed")
TINY = "--dim 32 --n_layers 1 --n_heads 4 --max_seq_len 32 --max_steps 2 --sample_tokens 4"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The repository in a folder of its own."""
    return copy_repository(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def path_without_compilers(tmp_path_factory) -> str:
    """A PATH with this Python and a few tools. The environment's own folder holds ninja."""
    folder = tmp_path_factory.mktemp("bin")
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Enough text for 6400 pieces: a few modules of the standard library."""
    path = tmp_path_factory.mktemp("text") / "tiny.jsonl"
    modules = sorted(Path(os.__file__).parent.glob("*.py"))
    lines = [json.dumps({"text": file.read_text(encoding="utf-8")}) for file in modules[:60]]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def runs(clone: Path) -> list[Path]:
    return list((clone / "out" / "runs").glob("*"))


def run_accelerate(clone: Path, text: Path, flags: str, **environ: str) -> Finished:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = {"PATH": path, "DATA": str(text), "NUM_PROCESSES": "1"} | environ
    return run(["bash", "run_accelerate.sh", *flags.split()], cwd=clone, **settings)


@pytest.mark.parametrize(
    ("flags", "environ", "says"),
    [
        ("--dim 7", {}, "dim 7 is not divisible by n_heads 4"),
        ("--resume out/runs/none", {}, "--resume out/runs/none: neither a run"),
        ("", {"NUM_PROCESSES": "zero"}, "number of processes"),
        ("", {"CONFIG": "missing.yaml"}, "missing.yaml"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_launched(clone, text, flags, environ, says):
    before = runs(clone)
    ended = run_accelerate(clone, text, flags, **environ)
    assert ended.code == 2, ended.out
    assert "Traceback" not in ended.out
    (line,) = [line for line in ended.out.splitlines() if "error" in line.lower()]
    assert line.startswith("run_accelerate.sh: error: ")
    assert says in line
    assert runs(clone) == before
    assert not (clone / ".venv").exists()


def test_without_a_compiler_it_prepares_trains_and_leaves_a_model(
    clone, text, path_without_compilers
):
    for tool in ("cc", "c++", "gcc", "g++", "clang", "ninja", "nvcc"):
        assert shutil.which(tool, path=path_without_compilers) is None
    ended = run_accelerate(clone, text, f"{TINY} --run_name mine", PATH=path_without_compilers)
    assert ended.code == 0, ended.out
    assert "engine: DeepSpeed ZeRO-2" in ended.out
    assert (clone / "out" / "data" / "tiny" / "dataset.json").is_file()
    run_folder = clone / "out" / "runs" / "mine"
    assert (run_folder / "weights" / "model.safetensors").is_file()
    assert (run_folder / "loss.png").is_file()
    # flags typed win over those of the script
    settings = json.loads((run_folder / "settings.json").read_text(encoding="utf-8"))
    assert settings["arguments"]["max_steps"] == 2
    assert settings["model"]["dim"] == 32
    # the environment that was active was used as it is
    assert not (clone / ".venv").exists()
    assert "installing" not in ended.out


def test_a_short_text_gets_a_smaller_vocabulary(clone, tmp_path):
    (tmp_path / "small.jsonl").write_text('{"text": "very little text"}\n' * 50, encoding="utf-8")
    ended = run_accelerate(clone, tmp_path / "small.jsonl", TINY)
    assert ended.code == 0, ended.out
    assert 260 < int(re.search(r"vocabulary (\d+),", ended.out)[1]) < 300


def test_data_prepared_by_hand_is_used_as_it_is(clone, corpus):
    by_hand = [sys.executable, "-m", "scripts.prepare_data", "--data", str(corpus)]
    assert run([*by_hand, "--vocab_size", "450"], cwd=clone).code == 0
    ended = run_accelerate(clone, corpus, TINY)
    assert ended.code == 0, ended.out
    assert "used as it is" in ended.out
    assert "vocabulary 450)" in ended.out
