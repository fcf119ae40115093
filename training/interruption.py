"""Stopping in good order: a signal or a time limit ends the run after the step, on all ranks."""

import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from training.engine.launch import Engine
from training.notebook import in_notebook

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Ctrl-C reaches a rank twice, from the terminal and from the launcher: that is one request.
SAME_REQUEST_SECONDS = 2.0
# Names a file that a run told to stop leaves when it has saved, for run_accelerate.sh.
STOP_NOTE = "STOP_NOTE"
CHECKPOINT_WRITER = "checkpoint writer"  # name of a thread, which a rank that leaves waits for
# What ranks tell each other: a signal's number, or one of these, which no such signal has.
SAVE, TIME_LIMIT = 1, 1000


class StopRequest:
    """Asks all ranks, once per step, whether one of them has been told to stop, and the main one
    whether it is time for a checkpoint.

    A first signal is noted; a second one, a moment later, ends the process at once, or the run if
    the process is to live on.

    Args:
        time_limit: minutes after which to stop; None for never.
        save_minutes: minutes from one checkpoint to the next; 0 for never.
        since: when the program started, by `time.monotonic`.
    """

    def __init__(self, engine: Engine, time_limit: float | None, save_minutes: float, since: float):
        self.engine = engine
        self.deadline = since + 60 * time_limit if time_limit else float("inf")
        self.save_minutes = save_minutes
        self._signal, self._since = 0, 0.0
        self.saved()
        for number in SIGNALS:
            signal.signal(number, self._note)

    def saved(self) -> None:
        """A checkpoint has been written, or is being written: the next one is so far away again."""
        self.time_to_save = False
        self._save_at = time.monotonic() + 60 * self.save_minutes

    def reason(self) -> str | None:
        """Why to stop now, the same on every rank; None to go on, and then `time_to_save` is the
        same on every rank too. Every process must call it."""
        now = time.monotonic()
        code = self._signal or (TIME_LIMIT if now > self.deadline else 0)
        if not code and self.engine.is_main and self.save_minutes and now > self._save_at:
            code = SAVE
        code = self.engine.largest(code)
        self.time_to_save = code == SAVE
        if code in (0, SAVE):
            return None
        return "the time limit" if code == TIME_LIMIT else signal.Signals(code).name

    def _note(self, number: int, frame) -> None:
        if self._signal and time.monotonic() - self._since > SAME_REQUEST_SECONDS:
            if in_notebook():
                raise KeyboardInterrupt
            os._exit(128 + number)
        if not self._signal:
            self._signal, self._since = number, time.monotonic()


def leave_note() -> None:
    """That the run was told to stop and has saved, for run_accelerate.sh."""
    if note := os.environ.get(STOP_NOTE):
        Path(note).touch()


def end_stopped(engines: Sequence[Engine], saved: bool) -> None:
    """The end of a process that was told to stop, and of all that it trained; with exit code 1 if
    that is not saved."""
    if saved and engines[0].accelerator.is_local_main_process:
        leave_note()  # every machine has a launcher
    for engine in engines:
        engine.accelerator.end_training()
    if not saved:
        sys.exit(1)


def how_to_resume(run: Path | str) -> str:
    """What to type to go on: as it was typed, with --resume."""
    resume = f"--resume {shlex.quote(str(run))}"
    if own := os.environ.get("RESUME_WITH"):  # run_accelerate.sh, quoted as Bash does it
        own = re.sub(r" --resume[ =](\\.|[^\s\\])+", "", own)  # of an earlier stop
        return f"{own} {resume}"
    launched = "RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if launched:  # a launcher's own flags are not known here
        return f"the same command with {resume}"
    words = [python(), *sys.argv]
    if "--resume" in words:  # of an earlier stop
        position = words.index("--resume")
        words = words[:position] + words[position + 2 :]
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"{f'CUDA_VISIBLE_DEVICES={devices} ' if devices else ''}{shlex.join(words)} {resume}"


def python() -> str:
    """What to type for the Python that runs this."""
    here = Path(sys.executable)
    if here.is_relative_to(Path.cwd()):  # run_accelerate.sh may have made .venv
        return str(here.relative_to(Path.cwd()))
    return next(
        (name for name in ("python", "python3") if shutil.which(name) == str(here)), str(here)
    )


def leave() -> None:
    """End a rank that is done, or has said why it ends, without the interpreter's shutdown: the
    launcher then ends the others before they say the same.

    And in the milliseconds after a last exchange a thread of gloo may still let go of a tensor,
    which takes the interpreter's lock; on an interpreter that is shutting down that aborts the
    process (seen in one of twenty short runs, "terminate called without an active exception").
    """
    error = sys.exc_info()[1]
    if "RANK" not in os.environ or not isinstance(error, SystemExit | None):
        return
    for thread in threading.enumerate():  # those of libraries may wait for the shutdown to end
        if thread.name == CHECKPOINT_WRITER:
            thread.join()
    for output in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError):  # closed, on a full disk, or nobody reads it
            output.flush()
    os._exit(error.code if error else 0)
