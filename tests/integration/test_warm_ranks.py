"""A program in a fork of tests/warm_ranks.py sees what it would see in a fresh interpreter."""

import json
import os

import pytest
from conftest import REPOSITORY, launch_command, run, run_warm

pytestmark = pytest.mark.slow

PROGRAM = r"""
import json, os, signal, sys, warnings
signals = {n: str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()}
facts = {"folder": os.getcwd(), "command line": sys.argv, "search path": sys.path}
facts |= {"program": [__name__, __file__], "signals": signals}
import numpy, random, torch
import train_pretrain_accelerate
facts |= {
    "environment": dict(os.environ),
    "exceptions": sys.excepthook.__qualname__,
    "threads": torch.get_num_threads(),
    "numbers": [torch.rand(1).item(), numpy.random.rand(), random.random()],
}
with open(os.environ["FACTS_TO"] + os.environ.get("RANK", "0"), "w") as file:
    json.dump(facts, file)
"""
# May differ: a free port, torchrun's file, what `import deepspeed` sets, the path of the facts.
DIFFERENT = ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "PYTORCH_NVML_BASED_CUDA_CHECK", "FACTS_TO")


def test_the_forks_of_a_launcher_see_what_fresh_interpreters_see(tmp_path):
    script, all_facts, numbers = tmp_path / "program.py", [], []
    script.write_text(PROGRAM)
    for start in (run, run_warm):
        search = f"{script.parent}{os.pathsep}{REPOSITORY}"
        more = {"FACTS_TO": f"{tmp_path}/{start.__name__}-", "PYTHONPATH": search, "OTHER": "x y"}
        command = launch_command("zero2", 2, str(script), "a b", "--flag", "")
        start(command, **more).worked()
        files = sorted(tmp_path.glob(f"{start.__name__}-*"))
        all_facts.append([json.loads(file.read_text()) for file in files])
        for facts in all_facts[-1]:
            numbers += facts.pop("numbers")
            for key in DIFFERENT:
                facts["environment"].pop(key, None)
    fresh, forked = all_facts
    assert forked == fresh
    assert len(forked) == 2
    assert len(set(numbers)) == len(numbers)  # all random numbers differ: nothing is seeded
