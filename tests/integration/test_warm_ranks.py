"""Programs that warm_ranks.py forks find what they would in a fresh interpreter, and end as they
would. That they compute the same: test_launch.py."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, SAFETY_NET_SECONDS, run, run_warm, start_warm

pytestmark = pytest.mark.slow

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
STARTS = {
    "python": [sys.executable],
    "python -m": [sys.executable, "-m"],
    "DDP": [*LAUNCH, "--multi_gpu", "--num_processes", "2"],
    "ZeRO-2": [*LAUNCH, "--config_file", "accelerate_config.yaml", "--num_processes", "2"],
}
TELLS = r"""
import json, logging, os, signal, sys, warnings
facts = {
    "folder": os.getcwd(),
    "command line": sys.argv,
    "search path": sys.path,
    "program": [__name__, __file__, "train_pretrain_accelerate" in sys.modules],
    "signals": {n: str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
}
import numpy, random, torch
import train_pretrain_accelerate
facts |= {
    "environment": dict(os.environ),
    "exceptions": sys.excepthook.__qualname__,
    "log": [logging.root.level, len(logging.root.handlers)],
    # sympy's is about itself; torch loads it in the first step
    "warnings": [s for s in map(str, warnings.filters) if "SymPy" not in s],
    "threads": torch.get_num_threads(),
    "precision": str(torch.get_default_dtype()),
    "numbers": [torch.rand(1).item(), numpy.random.rand(), random.random()],
}
with open(os.environ["TOLD"] + os.environ.get("RANK", "0"), "w") as file:
    json.dump(facts, file)
os.write(1, sys.stdin.read().encode() + b"out\n")
os.write(2, b"on the other stream\n")
"""


def told(start, how: str, script: Path, path: Path) -> tuple[list[dict], list[str]]:
    """What a program says about itself, per rank, and what was seen of it."""
    name = script.stem if how == "python -m" else str(script)
    search = f"{script.parent}{os.pathsep}{REPOSITORY}"
    more = {"TOLD": f"{path}/{start.__name__}-", "PYTHONPATH": search, "OTHER": "x y"}
    ended = start([*STARTS[how], name, "a b", "--flag", ""], **more)
    assert ended.code == 0, ended.out
    lines = [line for line in ended.out.splitlines() if line.startswith(("out", "on the"))]
    files = sorted(path.glob(f"{start.__name__}-*"))
    return [json.loads(file.read_text()) for file in files], sorted(lines)


LIKE_OTHERS = dict.fromkeys(("DDP", "python -m"), pytest.mark.variant)
HOW = [pytest.param(how, marks=LIKE_OTHERS.get(how, ())) for how in STARTS]


@pytest.mark.parametrize("how", HOW)
def test_a_forked_program_finds_what_a_fresh_interpreter_does(how, tmp_path):
    script = tmp_path / "tells.py"
    script.write_text(TELLS)
    (fresh, seen_fresh), (forked, seen) = (
        told(start, how, script, tmp_path) for start in (run, run_warm)
    )
    assert seen == seen_fresh
    assert len(seen) == 2 * len(forked) == 2 * (1 if how.startswith("python") else 2)
    for facts in (*fresh, *forked):
        # a port that was free, files of torchrun's own, and where the facts go
        for name in ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TOLD"):
            facts["environment"].pop(name, None)
    numbers = [number for facts in (*fresh, *forked) for number in facts.pop("numbers")]
    assert len(set(numbers)) == len(numbers)  # nobody has seeded anything
    for mine, expected in zip(forked, fresh, strict=True):
        for fact, value in expected.items():
            assert mine[fact] == value, fact


def test_the_end_of_a_forked_program_is_known(tmp_path):
    ends = tmp_path / "ends.py"
    for statement, code in {
        "raise SystemExit(7)": 7,
        "raise ValueError": 1,
        "import os; os._exit(3)": 3,
        "import os; os.kill(os.getpid(), 9)": -signal.SIGKILL,
        "pass": 0,
    }.items():
        ends.write_text(statement)
        ended = run_warm([sys.executable, str(ends)])
        assert ended.code == code
        assert ("Traceback" in ended.out) == (statement == "raise ValueError")


def test_when_a_forked_rank_fails_the_other_is_ended(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1': 1 / 0\ntime.sleep(86400)")
    ended = run_warm([*STARTS["DDP"], str(script)])
    assert ended.code == 1
    assert "ZeroDivisionError" in ended.out


def test_what_nobody_waits_for_is_ended(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text("import time\ntime.sleep(86400)")
    with open(tmp_path / "log", "w") as log:
        process = start_warm([*STARTS["DDP"], str(script)], log)
    assert [os.kill(pid, 0) for pid in process.ranks] == [None, None]
    process.abandon()
    end = time.monotonic() + SAFETY_NET_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in process.ranks):
        assert time.monotonic() < end
        time.sleep(0.02)
