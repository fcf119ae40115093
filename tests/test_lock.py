import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from common.errors import UsageError
from storage.folder import lock
from training.engine.deepspeed_setup import set_up_deepspeed
from training.engine.launch import Engine

HOLD = """
import os, sys
from pathlib import Path
from storage.folder import lock
lock(Path(sys.argv[1]))
os.fork()  # the child outlives its killed parent, as a data loader process does for seconds
os.write(1, b"held\\n")
sys.stdin.read()  # returns when the process of the tests ends
"""


def test_a_live_process_holds_the_lock_and_a_killed_one_does_not(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert [holder.stdout.readline() for _ in range(2)] == ["held\n"] * 2
        with pytest.raises(UsageError) as error:
            lock(tmp_path / "lock")
        assert f"in use by process {holder.pid} on {os.uname().nodename}:" in str(error.value)
        holder.kill()
        holder.wait()
        lock(tmp_path / "lock")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGKILL)  # the child that HOLD has forked
    assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()


def test_two_runs_do_not_share_a_folder_on_nvme(tmp_path, accelerator):
    zero = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "new" / "one")}}
    lock(tmp_path / "new" / "one" / "lock")
    with pytest.raises(UsageError, match=r'one is in use by .* use another "nvme_path"'):
        set_up_deepspeed(Engine(accelerator, "ZeRO-3", {"zero_optimization": zero}))
    with pytest.raises(UsageError, match="lock cannot be used: "):
        lock(tmp_path / "new" / "one" / "lock" / "lock")
