import importlib
import re
import shlex

import pytest
from conftest import REPOSITORY

DOCUMENTS = ("README.md", "README_zh.md", "docs/performance.md", "docs/lab-log.md")
# What stands in them in pieces.
IN_PIECES = [
    "benchmarks.optimizer_step --max_seq_len 256 --dim 192 --n_layers 4 --n_heads 4 "
    "--batch_size 32",
    "benchmarks.optimizer_step --max_seq_len 256 --batch_size 16 --rounds 6",
    "benchmarks.data --repeat 1 --shape preset --loader_seq_lens 256 --seq_len 256 --num_workers 0 "
    "--steps 20 --seconds 1",
    "benchmarks.generation --sizes 3m,26m --dtypes float32 --batch_sizes 1 --rounds 3",
]


def documented() -> list[str]:
    """Every benchmark with the flags after it, each once."""
    texts = [(REPOSITORY / name).read_text(encoding="utf-8") for name in DOCUMENTS]
    found = re.findall(r"python -m (benchmarks\.\w+[^`\n]*)", "\n".join(texts))
    return [*dict.fromkeys(found), *IN_PIECES]


def test_every_benchmark_is_documented():
    programs = {command.split()[0] for command in documented()}
    modules = (REPOSITORY / "benchmarks").glob("*.py")
    mains = {
        f"benchmarks.{path.stem}" for path in modules if "PROGRAM =" in path.read_text("utf-8")
    }
    assert programs == mains


@pytest.mark.parametrize("command", documented())
def test_every_documented_command_is_understood(command):
    program, *words = shlex.split(command)
    assert importlib.import_module(program).parse_options(words) is not None
