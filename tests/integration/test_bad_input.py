"""A program that cannot work prints one line with the reason and exits with code 2."""

import socket

import pytest
from conftest import run_warm, train_command

pytestmark = pytest.mark.slow


@pytest.fixture
def refused(packed, tmp_path):
    """Runs training without a launcher. Training must end with an error. Returns the error line."""

    def refused(flags: str, **environ: str) -> str:
        command = train_command("plain", 1, packed, tmp_path / "runs" / "run", flags)
        return run_warm(command, **environ).error()

    return refused


def test_results_that_do_not_fit_on_the_disk_end_the_run_in_one_line(refused, small_disk):
    disk = small_disk("300k")
    assert "no space left" in refused(f"--max_steps 1 --dim 64 --out_dir {disk}")


def test_a_port_in_use_is_an_error_of_one_line(refused):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        line = refused("", RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", **place)
    assert f"127.0.0.1:{port}" in line
