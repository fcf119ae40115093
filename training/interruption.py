"""Stopping in good order: a signal or a time limit ends the run after the step, on all ranks."""

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from report.page import leave_report
from training.guest import is_guest
from training.run_folder import RunFolder

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Ctrl-C reaches a rank twice, from the terminal and from the launcher: that is one request.
SAME_REQUEST_SECONDS = 2.0
TIME_LIMIT = 1000  # beyond every signal's number


class StopRequest:
    """Asks all ranks, once per step, whether one of them has been told to stop.

    A first signal is noted; a second one, a moment later, ends the process at once, or the run if
    the process is to live on.

    Args:
        time_limit: minutes after which to stop; None for never.
        since: when the program started, by `time.monotonic`.
    """

    def __init__(self, accelerator: Accelerator, time_limit: float | None, since: float):
        self.accelerator = accelerator
        self.deadline = since + 60 * time_limit if time_limit else float("inf")
        self._signal, self._since = 0, 0.0
        # A group of its own on the CPU: asking must neither wait for the GPU nor disturb it.
        self._group = None
        if accelerator.num_processes > 1:
            self._group = torch.distributed.new_group(backend="gloo")
        for number in SIGNALS:
            signal.signal(number, self._note)

    def reason(self) -> str | None:
        """Why to stop now, the same on every rank; None to go on. Every process must call it."""
        code = self._signal or (TIME_LIMIT if time.monotonic() > self.deadline else 0)
        if self._group is not None:
            everyone = torch.tensor([code])
            torch.distributed.all_reduce(everyone, torch.distributed.ReduceOp.MAX, self._group)
            code = int(everyone)
        if code == 0:
            return None
        return "the time limit" if code == TIME_LIMIT else signal.Signals(code).name

    def _note(self, number: int, frame) -> None:
        if self._signal and time.monotonic() - self._since > SAME_REQUEST_SECONDS:
            if is_guest():
                raise KeyboardInterrupt
            os._exit(128 + number)
        if not self._signal:
            self._signal, self._since = number, time.monotonic()


def report_interruption(
    reason: str, step: int, run: RunFolder, saved: bool, accelerator: Accelerator
) -> None:
    """The last words of a run that stops before its end; exit code 1 if it could not save."""
    state = "saved" if saved else "NOT SAVED"
    command = "nothing has been saved so far"
    if run.latest.exists():
        command = f"to go on:\n  {resume_command(run.path)}"
    message = f"stopped by {reason} after step {step}, {state}; {command}"
    accelerator.print(message, flush=True)
    if accelerator.is_main_process:
        print(f"report: {leave_report(run)}", flush=True)
    if saved and accelerator.is_main_process and (note := os.environ.get("STOP_NOTE")):
        Path(note).write_text(message + "\n", encoding="utf-8")
    accelerator.end_training()
    if not saved:
        sys.exit(1)


def _launcher() -> list[str]:
    """The command line of the launcher that started this rank; empty if none did."""
    if "RANK" not in os.environ:
        return []
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")[:-1]
    except (OSError, UnicodeDecodeError):
        return []
    launchers = ("accelerate", "accelerate.commands.launch", "torchrun", "torch.distributed.run")
    return words if any(Path(word).name in launchers for word in words[:3]) else []


LAUNCHER = _launcher()  # now, while it is there


def resume_command(run: Path) -> str:
    """What to type to go on: the launcher's command line, or this process's, with --resume."""
    if own := os.environ.get("RESUME_WITH"):  # run_accelerate.sh, as it was typed
        return f"{own} --resume {shlex.quote(str(run))}"
    words = LAUNCHER or [sys.executable, *sys.argv]
    if "--resume" in words:  # of an earlier stop
        position = words.index("--resume")
        words = words[:position] + words[position + 2 :]
    command = shlex.join([*words, "--resume", str(run)])
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"CUDA_VISIBLE_DEVICES={devices} {command}" if devices else command


def leave() -> None:
    """End a rank that is done, without the interpreter's shutdown.

    In the milliseconds after a last exchange a thread of gloo may still let go of a tensor, which
    takes the interpreter's lock; on an interpreter that is shutting down that aborts the process
    (seen in one of twenty short runs, "terminate called without an active exception").
    """
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
