"""Stop all ranks after the same step when a signal arrives or the time limit is over."""

import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from lm.common.errors import LAUNCHER_ENDED, handle
from lm.engine.engine import Engine

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, LAUNCHER_ENDED)
SAME_REQUEST_SECONDS = 2.0  # after Ctrl-C, terminal and launcher may both send a signal
LIVES_ON = "PROCESS_LIVES_ON"  # environment variable: set if the process goes on after the run
STOP_NOTE = "STOP_NOTE"  # environment variable: file to create when a stopped run is saved
# Codes that ranks exchange: the largest counts. A signal's code is its number, 1 for SIGHUP.
NOTHING, SAVE, TIME_LIMIT = -1, 0, 1000
REASONS = {TIME_LIMIT: "the time limit", LAUNCHER_ENDED: "the end of its launcher"}


class StopRequest:
    """Decide after each step whether all ranks stop or save. A signal more than 2 s after the first
    ends the process, or the cell if it is SIGINT in a notebook. LAUNCHER_ENDED never does so: a
    launcher may end while its ranks save. `time_limit` is in minutes."""

    def __init__(self, engine: Engine, time_limit: float | None, save_minutes: float, since: float):
        self.engine = engine
        self.deadline = since + 60 * (time_limit or math.inf)  # since: time.monotonic() at start
        self.save_seconds = 60 * (save_minutes or math.inf)
        self._signal, self._signalled_at = 0, 0.0  # the first signal and its time
        self.time_to_save, self._save_at = False, 0.0  # the time of the next save
        self.saved()
        handle(SIGNALS, self._on_signal)

    def saved(self) -> None:
        """Restart the clock of --save_minutes, because a save has begun."""
        self.time_to_save = False
        self._save_at = time.monotonic() + self.save_seconds

    def reason(self) -> str | None:
        """Return the reason to stop or None; set `time_to_save`. Every process must call this."""
        now = time.monotonic()
        mine = SAVE if self.engine.is_main and now > self._save_at else NOTHING
        mine = TIME_LIMIT if now > self.deadline else mine
        code = self.engine.largest(self._signal or mine)
        self.time_to_save = code == SAVE
        if code <= SAVE:
            return None
        return REASONS.get(code) or signal.Signals(code).name

    def _on_signal(self, number: int, frame) -> None:
        is_later = time.monotonic() - self._signalled_at > SAME_REQUEST_SECONDS
        if not self._signal:
            self._signal, self._signalled_at = number, time.monotonic()
        elif is_later and number != LAUNCHER_ENDED:
            if number == signal.SIGINT and LIVES_ON in os.environ:  # a notebook
                raise KeyboardInterrupt
            os._exit(128 + number)


def leave_note() -> None:
    """Tell this machine's launcher that a stopped run is saved."""
    if note := os.environ.get(STOP_NOTE):
        with suppress(OSError):  # without the note, the exit code is that of the signal
            Path(note).touch()


def how_to_resume(run: Path | str) -> str:
    """Return the command that resumes a run, or the words "the same command with --resume RUN"."""
    typed = f"{python()} {shlex.join(sys.argv)}"
    if "RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ:
        typed = "the same command with"  # this process does not know the launcher's flags
    typed = os.environ.get("RESUME_WITH", typed)  # run_accelerate.sh sets it
    typed = re.sub(r" --resume[ =]('[^']*'|\\.|[^\s\\])+", "", typed)  # a quoted or a bare value
    return f"{typed} --resume {shlex.quote(str(run))}"


def python() -> str:
    """Return the command of this Python: "python" if the user's PATH leads to it, else its path."""
    here, executable = Path.cwd(), Path(sys.executable)  # it may run as python3.11
    # run_accelerate.sh changes PATH, and sets TYPED_PATH.
    found = Path(shutil.which("python", path=os.environ.get("TYPED_PATH")) or "")
    if found.parent == executable.parent and found.samefile(executable):
        return "python"
    inside = executable.is_relative_to(here)
    return shlex.quote(str(executable.relative_to(here) if inside else executable))
