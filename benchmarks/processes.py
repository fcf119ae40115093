"""End all processes that a program has started, also those whose parent has ended."""

import ctypes
import sys
import time
from contextlib import suppress

import psutil

PR_SET_CHILD_SUBREAPER = 36  # from sys/prctl.h


def adopt_orphans() -> None:
    """Make a descendant whose parent ends a child of this process, so that `end_all` finds it. Only
    Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_all() -> None:
    """Kill all descendants of this process. Give up after 5 s."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        found = psutil.Process().children(recursive=True)
        if not found:
            return
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=1)
