"""Tasks that srun, mpirun or a platform has started train one run, or are refused."""

import os
import re

import pytest
from conftest import error_of

from lm.common.tasks import join_tasks
from scripts import evaluate, generate

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
