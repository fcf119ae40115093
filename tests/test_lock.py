import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from common.errors import UsageError
from storage.folder import lock, release_locks

HOLD = """
import os, sys
from pathlib import Path
from storage.folder import lock
lock(Path(sys.argv[1]))
os.fork()  # a child, such as a data loader's, lives for seconds after its parent was killed
os.write(1, b"held\\n")
sys.stdin.read()  # returns when the process of the tests ends
"""


@contextmanager
def holder_of(lock: Path):
    """Start a process that holds the lock; at the end of the block, kill it and its children."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)],
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


def test_a_live_process_holds_the_lock_and_a_killed_one_does_not(tmp_path):
    with holder_of(tmp_path / "lock") as holder:
        assert [holder.stdout.readline() for _ in range(2)] == ["held\n"] * 2
        with pytest.raises(UsageError) as error:
            lock(tmp_path / "lock")
        assert f"in use by process {holder.pid} on {os.uname().nodename}:" in str(error.value)
        holder.kill()
        holder.wait()
        lock(tmp_path / "lock")
    assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()


def test_two_runs_do_not_share_a_folder_on_nvme(tmp_path):
    lock(tmp_path / "new" / "one" / "lock", '"nvme_path"')
    lock(tmp_path / "two" / "lock", '"nvme_path"')
    with pytest.raises(UsageError, match=r'one is in use by .* use another "nvme_path"'):
        lock(tmp_path / "new" / "one" / "lock", '"nvme_path"')
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file cannot be used: "):
        lock(tmp_path / "file" / "lock", '"nvme_path"')
    release_locks()
