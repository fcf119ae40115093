import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from conftest import error_of
from test_resume_choice import locks, make_run, write_empty  # noqa: F401  "locks" is a fixture

from lm.common.errors import UsageError
from lm.engine.deepspeed_setup import set_up_deepspeed
from lm.engine.engine import Engine
from lm.storage.folder import RunFolder, claim_new, lock
from lm.training.arguments import TrainingArguments
from lm.training.starting_point import find_starting_points

HOLD = """
import os, sys
from pathlib import Path
from lm.storage.folder import lock
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
        user = f"in use by process {holder.pid} on {os.uname().nodename}:"
        assert user in error_of(lock, tmp_path / "lock")
        holder.kill()
        holder.wait()
        lock(tmp_path / "lock")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGKILL)  # the child that HOLD has forked
    assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()


def test_a_new_run_gets_a_folder_of_its_own_or_the_reason(tmp_path):
    names = [claim_new(RunFolder(tmp_path / "out" / "now")).path.name for _ in range(3)]
    assert names == ["now", "now-2", "now-3"]
    assert "in use by process" in error_of(lock, tmp_path / "out" / "now-3" / "lock")
    (tmp_path / "file").touch()
    assert "cannot be used: " in error_of(claim_new, RunFolder(tmp_path / "file" / "runs" / "now"))


def test_two_runs_do_not_share_a_folder_on_nvme(tmp_path, accelerator):
    zero = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "new" / "one")}}
    lock(tmp_path / "new" / "one" / "lock")
    with pytest.raises(UsageError, match=r'one is in use by .* use another "nvme_path"'):
        set_up_deepspeed(Engine(accelerator, "ZeRO-3", {"zero_optimization": zero}))
    assert "lock cannot be used: " in error_of(lock, tmp_path / "new" / "one" / "lock" / "lock")


@pytest.mark.parametrize("resume", ["auto", "PATH", None])
@pytest.mark.parametrize("saved", [[], [1]])
def test_a_run_is_locked_before_its_checkpoint_is_chosen(tmp_path, monkeypatch, saved, resume):
    """The job before this one saves step 2, and ends, while this one starts."""
    run = RunFolder(make_run(tmp_path / "run", *saved))
    run.metrics.unlink()
    if resume == "PATH":
        write_empty(run, 1)
        resume = str(run.path)

    def last_save(run: RunFolder) -> None:
        write_empty(run, 2)
        run.metrics.touch()

    monkeypatch.setattr("lm.training.starting_point.claim", last_save)
    args = TrainingArguments(out_dir=str(tmp_path), run_name="run", resume=resume)
    if resume is None:
        assert "holds a run: pass --resume auto" in error_of(find_starting_points, [args], True)
    else:
        assert find_starting_points([args], True)[0].checkpoint == run.checkpoint(2)


def test_a_run_that_is_only_looked_at_is_not_locked(tmp_path):
    run = RunFolder(make_run(tmp_path / "run", 1))
    args = TrainingArguments(out_dir=str(tmp_path), resume="auto")
    find_starting_points([args])
    assert not run.lock.exists()
    for _ in range(2):
        find_starting_points([args], claims=True)
    assert "in use by process" in error_of(lock, run.lock)
