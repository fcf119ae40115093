"""Programs that warm_ranks.py forks find what they would in a fresh interpreter, and end as they
would. That they compute the same: test_launch.py."""

import json
import os
import sys

import pytest
from conftest import REPOSITORY, run, run_warm

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
"""
# A port that was free, files of torchrun's own, and where the facts go.
DIFFERENT = ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TOLD")
VARIANTS = dict.fromkeys(("DDP", "python -m"), pytest.mark.variant)


@pytest.mark.parametrize("how", [pytest.param(how, marks=VARIANTS.get(how, ())) for how in STARTS])
def test_a_forked_program_finds_what_a_fresh_interpreter_does(how, tmp_path):
    script, told, numbers = tmp_path / "tells.py", [], []
    script.write_text(TELLS)
    for start in (run, run_warm):
        name = script.stem if how == "python -m" else str(script)
        search = f"{script.parent}{os.pathsep}{REPOSITORY}"
        more = {"TOLD": f"{tmp_path}/{start.__name__}-", "PYTHONPATH": search, "OTHER": "x y"}
        ended = start([*STARTS[how], name, "a b", "--flag", ""], **more)
        assert ended.code == 0, ended.out
        told.append(
            [json.loads(file.read_text()) for file in sorted(tmp_path.glob(f"{start.__name__}-*"))]
        )
        for facts in told[-1]:
            numbers += facts.pop("numbers")
            for key in DIFFERENT:
                facts["environment"].pop(key, None)
    fresh, forked = told
    assert len(forked) == (1 if how.startswith("python") else 2)
    assert forked == fresh
    assert len(set(numbers)) == len(numbers)  # nobody has seeded anything


@pytest.mark.parametrize(
    ("how", "statement", "code"),
    [
        ("python", "raise SystemExit(7)", 7),
        ("python", "raise ValueError", 1),
        ("python", "import os; os.kill(os.getpid(), 9)", -9),
        ("DDP", "import os, time; os.environ['RANK'] == '1' and 1 / 0; time.sleep(86400)", 1),
    ],
)
def test_the_end_of_a_forked_program_is_known(tmp_path, how, statement, code):
    """A launcher ends the other ranks when one fails."""
    (tmp_path / "ends.py").write_text(statement)
    ended = run_warm([*STARTS[how], str(tmp_path / "ends.py")])
    assert ended.code == code
    assert ("Traceback" in ended.out) == (code == 1)
