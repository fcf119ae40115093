"""A process notices that its launcher has ended, also after SIGKILL."""

import os
import signal
import subprocess
import sys

import pytest
from conftest import REPOSITORY, clean_environment

from common import launcher
from common.launcher import LAUNCHER_ENDED, MARKS, end_with_launcher

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
