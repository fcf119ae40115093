"""A program that cannot work prints one line with the reason and exits with code 2."""

import socket
import sys

import pytest
from conftest import TINY, run_warm, train

pytestmark = pytest.mark.slow

SCRIPT = "train_pretrain_accelerate.py"


@pytest.fixture
def refused(packed, tmp_path):
    """Runs training without a launcher. Training must end with an error. Returns the error line."""

    def refused(flags: str, **environ: str) -> str:
        command = [sys.executable, SCRIPT, *TINY, "--data", str(packed), "--out_dir"]
        return run_warm([*command, str(tmp_path / "runs"), *flags.split()], **environ).error()

    return refused


def test_a_port_in_use_is_an_error_of_one_line(refused):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        line = refused("", RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", **place)
    assert f"127.0.0.1:{port}" in line


def test_the_variables_of_a_platform_are_no_launcher_and_two_tasks_are_no_two_runs(
    refused, packed, tmp_path
):
    platform = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "no.such", "MASTER_PORT": "23456"}
    flags = "--max_steps 1 --deepspeed ds_config.json"
    train("plain", 1, packed, tmp_path / "run", flags, **platform)
    task = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    assert "first export MASTER_ADDR=" in refused("", SLURM_PROCID="0", **task)


def test_results_that_do_not_fit_on_the_disk_end_the_run_in_one_line(refused, small_disk):
    disk = small_disk("300k")
    assert "no space left" in refused(f"--max_steps 1 --dim 64 --out_dir {disk}")
