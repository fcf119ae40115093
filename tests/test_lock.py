import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from common.errors import UsageError
from runs.lock import lock

HOLD = """
import os, sys
from pathlib import Path
from runs.lock import lock
lock(Path(sys.argv[1]))
os.write(1, b"held\\n")
sys.stdin.read()  # until it is killed, or the tests are
"""


@contextmanager
def process_of(script: str, lock: Path):
    """It runs until it is killed, with all that it has started, or the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    with process_of(HOLD, tmp_path / "lock") as process:
        assert process.stdout.readline() == "held\n"
        yield process


def test_a_live_process_keeps_others_out_and_is_named(holder, tmp_path):
    with pytest.raises(UsageError) as error:
        lock(tmp_path / "lock")
    assert f"in use by process {holder.pid} on {os.uname().nodename}" in str(error.value)


def test_a_killed_process_holds_nothing(holder, tmp_path):
    holder.kill()
    holder.wait()
    lock(tmp_path / "lock")
    assert str(os.getpid()) in (tmp_path / "lock").read_text()


def test_a_forked_process_that_outlives_the_holder_holds_nothing(tmp_path):
    """As processes that read data do, for seconds, when their parent is killed."""
    script = HOLD.replace("os.write", "os.fork()\nos.write")
    with process_of(script, tmp_path / "lock") as holder:
        assert [holder.stdout.readline() for _ in range(2)] == ["held\n"] * 2  # both are there
        holder.kill()
        holder.wait()
        lock(tmp_path / "lock")


def test_a_lock_file_of_nonsense_is_no_obstacle(tmp_path):
    (tmp_path / "lock").write_bytes(b"\xff{nonsense")
    lock(tmp_path / "lock")
    assert str(os.getpid()) in (tmp_path / "lock").read_text()


def test_a_holder_whose_name_cannot_be_read_is_still_a_holder(holder, tmp_path):
    (tmp_path / "lock").write_text("nonsense")
    with pytest.raises(UsageError, match="in use by another process"):
        lock(tmp_path / "lock")
