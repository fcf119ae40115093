"""Notice the end of the launcher that started this process."""

import ctypes
import os
import signal
import sys

# Variables that only a launcher sets: torchrun, accelerate launch, deepspeed, run_accelerate.sh.
MARKS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_MODE", "LOCAL_SIZE", "RESUME_WITH")
LAUNCHER_ENDED = signal.SIGUSR2  # it ends a process that does not handle it
PR_SET_PDEATHSIG = 1  # from sys/prctl.h


def end_with_launcher() -> None:
    """Let Linux send LAUNCHER_ENDED to this process when its launcher ends, for example by SIGKILL.
    A process that no launcher has started goes on when its parent, such as a shell, ends."""
    if sys.platform == "linux" and any(mark in os.environ for mark in MARKS):
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, LAUNCHER_ENDED)
        if os.getppid() != launcher:  # it ended before the call
            signal.raise_signal(LAUNCHER_ENDED)
