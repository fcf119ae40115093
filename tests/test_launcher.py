"""A process reads what its launcher has set, and notices its end, also after SIGKILL."""

import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import REPOSITORY, clean_environment, error_of

from lm.common import launcher
from lm.common.launcher import LAUNCHER_ENDED, MARKS, end_with_launcher, join_tasks
from scripts import evaluate, generate

PROGRAM = """
import common, os, time
parent = os.getppid()
print("ready", flush=True)
while os.getppid() == parent:
    time.sleep(0.01)
time.sleep(0.3)
print("lives on", flush=True)
"""
LAUNCH = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {PROGRAM!r}])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can send this signal")
@pytest.mark.parametrize("mark", [*MARKS, "RANK", "ACCELERATE_MIXED_PRECISION"])
def test_a_process_ends_with_its_launcher_but_not_with_its_shell(mark):
    """RANK and the precision may be set by a user whose shell starts the program."""
    environ = {k: v for k, v in clean_environment().items() if k not in MARKS} | {mark: "1"}
    start = {"cwd": REPOSITORY, "env": environ, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", LAUNCH], **start) as parent:
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        assert parent.stdout.read() == ("" if mark in MARKS else "lives on\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can send this signal")
def test_a_launcher_that_has_just_ended_is_noticed(monkeypatch):
    parents, raised = iter([7, 1]), []
    monkeypatch.setenv(MARKS[0], "1")
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    monkeypatch.setattr(launcher.ctypes, "CDLL", lambda name: launcher)
    monkeypatch.setattr(launcher, "prctl", lambda *_: None, raising=False)
    end_with_launcher()
    assert raised == [LAUNCHER_ENDED]


MEET = {"MASTER_ADDR": "node1", "MASTER_PORT": "23456"}
PLATFORM = {"RANK": "0", "WORLD_SIZE": "1", **MEET}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}
STEP |= {"SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "2(x2)"}
MPI = {f"OMPI_COMM_WORLD_{k}": v for k, v in {"SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}.items()}
TORCHRUN = PLATFORM | {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
JOINED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "after"),
    [
        (PLATFORM | {"PMI_RANK": "0", "PMI_SIZE": "1", "PET_NNODES": "1"}, {}),
        (PLATFORM | {"LOCAL_RANK": "0"}, {}),
        ({"RANK": "", "WORLD_SIZE": "", "OMPI_COMM_WORLD_SIZE": "1"}, {}),
        (MEET, MEET),
        (TORCHRUN, TORCHRUN),
        (STEP | MEET, STEP | MEET | JOINED),
        (MPI | MEET, MPI | MEET | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}),
        (JOINED | MEET, JOINED | MEET),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, {"SLURM_JOB_ID": "7"}),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # the shell of salloc
        (STEP | {"SLURM_NTASKS": "1"}, None),
    ],
)
def test_tasks_join_one_run_and_a_single_task_forgets_its_platform(monkeypatch, environ, after):
    monkeypatch.setattr(os, "environ", dict(environ))
    join_tasks()
    if after is None:
        assert not {"RANK", "WORLD_SIZE"} & {*os.environ}
    else:
        assert os.environ == after


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (STEP, "srun has started 4 processes, .* export MASTER_ADDR=.*scontrol.* MASTER_PORT="),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "srun has started 2 processes"),
        (MPI, "mpirun has started 2 processes, .* export MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT="),
        (
            PLATFORM | {"WORLD_SIZE": "2"},
            "the platform has started 2 .* first export LOCAL_RANK=0$",
        ),
        ({"PMI_SIZE": "2"}, "mpiexec has started 2 processes, .* export RANK=0"),
    ],
)
def test_tasks_that_would_train_alone_are_refused_with_what_to_type(monkeypatch, environ, says):
    monkeypatch.setattr(os, "environ", dict(environ))
    assert re.search(says, error_of(join_tasks))


def test_evaluate_and_generate_join_tasks_too(monkeypatch, refusal):
    monkeypatch.setattr(os, "environ", os.environ | {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"})
    for script, flags in ((evaluate, []), (generate, ["--prompt", "a"])):
        assert "srun has started 2 processes" in refusal(script, "no/run", *flags)
