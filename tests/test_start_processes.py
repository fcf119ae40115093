"""The launcher of run_accelerate.sh: how it starts a program, ends, and reports a failure."""

import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lm.launch import start_processes


def test_the_launcher_does_not_wait_for_other_machines_at_its_end(monkeypatch):
    # private: fails if PyTorch renames it
    waits = start_processes.SimpleElasticAgent._exit_barrier
    monkeypatch.setattr(start_processes.SimpleElasticAgent, "_exit_barrier", waits)
    monkeypatch.setattr(start_processes.launch, "main", lambda: None)
    assert start_processes.start() == 0
    assert start_processes.SimpleElasticAgent._exit_barrier(None) is None


def test_machines_that_cannot_connect_get_an_error_of_one_line(monkeypatch, capsys):
    error = torch.distributed.DistNetworkError("port `29500` is used\nand more")
    monkeypatch.setattr(start_processes.launch, "main", Mock(side_effect=error))
    assert start_processes.start() == 2
    said = "run_accelerate.sh: error: the machines cannot meet: port `29500` is used\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("code", "ends", "says"),
    [
        (2, 2, ""),  # the process has printed the reason
        (-11, 1, "process 1 was ended by SIGSEGV; to resume:\n  bash x "),
    ],
)
def test_a_failed_process_gives_its_exit_code_or_1_if_killed(monkeypatch, capsys, code, ends, says):
    monkeypatch.setenv("RESUME_WITH", "bash x")
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=code, error_file="none")
    error = start_processes.ChildFailedError("train.py", {1: failure})
    monkeypatch.setattr(start_processes.launch, "main", Mock(side_effect=error))
    assert start_processes.start() == ends
    said = capsys.readouterr().err
    assert says in said
    assert bool(says) == bool(said)


def test_a_program_of_one_process_replaces_the_launcher(tmp_path):
    """The program has the launcher's pid, so signals to the launcher reach the program."""
    config, program = tmp_path / "one.yaml", tmp_path / "program.py"
    config.write_text("{compute_environment: LOCAL_MACHINE, distributed_type: 'NO', use_cpu: true}")
    program.write_text("import os\nprint(os.getpid(), flush=True)\nos._exit(3)")
    command = [sys.executable, "-m", "lm.launch.start_processes", "--config_file", config, program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.read() == f"{process.pid}\n"
    assert process.returncode == 3
