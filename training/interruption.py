"""Stopping in good order: a signal or a time limit ends the run after the step, on all ranks."""

import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from training.engine.launch import Engine

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 2.0  # Ctrl-C reaches a rank from the terminal and from the launcher
STOP_NOTE = "STOP_NOTE"  # names a file that a run of run_accelerate.sh makes when it is saved
CHECKPOINT_WRITER = "checkpoint writer"  # name of the thread that `leave` waits for
SAVE, TIME_LIMIT = 1, 1000  # codes that ranks exchange, besides the numbers of signals


class StopRequest:
    """Asks all ranks, once per step, whether to stop, and the main rank whether to save. A second
    signal ends the process at once. Limits are in minutes, `since` is by `time.monotonic`."""

    def __init__(self, engine: Engine, time_limit: float | None, save_minutes: float, since: float):
        self.engine, self.deadline = engine, since + 60 * (time_limit or math.inf)
        self.save_seconds, self._signal, self._since = 60 * (save_minutes or math.inf), 0, 0.0
        self.saved()
        for number in SIGNALS:
            signal.signal(number, self._note)

    def saved(self) -> None:
        """Note that a checkpoint has begun; the next one is due --save_minutes later."""
        self.time_to_save = False
        self._save_at = time.monotonic() + self.save_seconds

    def reason(self) -> str | None:
        """Return why to stop, None to go on, and set `time_to_save`. Every process must call it."""
        now = time.monotonic()
        code = self._signal or TIME_LIMIT * (now > self.deadline)
        code = self.engine.largest(code or SAVE * (self.engine.is_main and now > self._save_at))
        self.time_to_save = code == SAVE
        if code <= SAVE:
            return None
        return "the time limit" if code == TIME_LIMIT else signal.Signals(code).name

    def _note(self, number: int, frame) -> None:
        if not self._signal:
            self._signal, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > SAME_REQUEST_SECONDS:
            if number == signal.SIGINT and "RANK" not in os.environ:  # maybe in a notebook
                raise KeyboardInterrupt
            os._exit(128 + number)


def end_stopped(engines: list[Engine], saved: bool) -> None:
    """End the processes of runs that were told to stop; exit code 1 if they are not saved."""
    note = os.environ.get(STOP_NOTE)
    if note and saved and engines[0].accelerator.is_local_main_process:
        Path(note).touch()  # every machine has a launcher
    for engine in engines:
        engine.accelerator.end_training()
    if not saved:
        sys.exit(1)


def how_to_resume(run: Path | str) -> str:
    """Return the command that was typed (RESUME_WITH by run_accelerate.sh) with --resume."""
    typed = shlex.join([python(), *sys.argv])
    if "RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ:
        typed = "the same command with"  # a launcher's flags are not known here
    typed = os.environ.get("RESUME_WITH", typed)
    typed = re.sub(r" --resume[ =]('[^']*'|\\.|[^\s\\])+", "", typed)  # quoted in either way
    return f"{typed} --resume {shlex.quote(str(run))}"


def python() -> str:
    """Return a short command for the Python that runs this."""
    return "python" if shutil.which("python") == sys.executable else sys.executable


def leave() -> None:
    """End a rank that is done, or has said why it ends, without the shutdown, in which gloo may
    abort. The launcher then ends the other ranks before they say the same."""
    error = sys.exc_info()[1]
    if "RANK" not in os.environ or not isinstance(error, SystemExit | None):
        return
    for thread in threading.enumerate():  # libraries' threads may wait for the shutdown to end
        if thread.name == CHECKPOINT_WRITER:
            thread.join()
    for output in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError):  # closed, on a full disk, or nobody reads it
            output.flush()
    os._exit(error.code if error else 0)
