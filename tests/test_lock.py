import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from common.errors import UsageError
from runs.folder import lock

HOLD = """
import os, sys
from pathlib import Path
from runs.folder import lock
lock(Path(sys.argv[1]))
os.write(1, b"held\\n")
sys.stdin.read()  # until it is killed, or the tests are
"""


@contextmanager
def process_of(script: str, lock: Path):
    """A process that runs until the block ends, with all that it has started."""
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


def test_a_live_process_keeps_others_out_and_a_killed_one_does_not(tmp_path):
    with process_of(HOLD, tmp_path / "lock") as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError) as error:
            lock(tmp_path / "lock")
        assert f"in use by process {holder.pid} on {os.uname().nodename}:" in str(error.value)
        holder.kill()
        holder.wait()
        lock(tmp_path / "lock")
    assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()


def test_a_forked_process_that_outlives_the_holder_holds_nothing(tmp_path):
    """As processes that read data do, for seconds, when their parent is killed."""
    script = HOLD.replace("os.write", "os.fork()\nos.write")
    with process_of(script, tmp_path / "lock") as holder:
        assert [holder.stdout.readline() for _ in range(2)] == ["held\n"] * 2  # both are there
        holder.kill()
        holder.wait()
        lock(tmp_path / "lock")
