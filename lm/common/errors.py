"""Errors and signals: a program ends with one line and an exit code, without a traceback."""

import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

EXIT_CODE = 2
STDOUT = 1  # file descriptor
# Variables that only a launcher sets: torchrun, accelerate launch, deepspeed, run_accelerate.sh.
MARKS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_MODE", "LOCAL_SIZE", "RESUME_WITH")
LAUNCHER_ENDED = signal.SIGUSR2  # it ends a process that does not handle it
PR_SET_PDEATHSIG = 1  # from sys/prctl.h


class UsageError(ValueError):
    """Flags, files or launcher settings cannot work, or contradict each other."""


class TooLittleMemoryError(UsageError):
    """Memory ran out."""


def reason(error: Exception) -> str:
    """Return the message of an error; for an OSError, leave out its number and path."""
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def reported(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Report any exception in this context by one line, and go on: a sample, a picture or a tracker
    must not cost a trained model."""
    try:
        yield
    except Exception as error:
        say(f"{what} NOT WRITTEN: {one_line(error)}")


def one_line(error: Exception) -> str:
    """Return the message of an error in one line, or the name of its type without a message."""
    return " ".join(str(error).split()) or type(error).__name__


class ReportedError(UsageError):
    """A child process has failed. It has already printed an error line, so no other is printed."""


def end_in_one_line(error_type: type[BaseException], error: BaseException, trace) -> None:
    """End in one line, with code 130, after Ctrl-C. Other exceptions are left to Python."""
    if not issubclass(error_type, KeyboardInterrupt):
        sys.__excepthook__(error_type, error, trace)
        return
    print(f"{Path(sys.argv[0]).stem}: stopped", file=sys.stderr, flush=True)
    sys.exit(128 + signal.SIGINT)


def handle(numbers: Iterable[int], handler: Callable | int) -> None:
    """Set the handler of these signals. SIGHUP stays ignored if it is, as after `nohup`."""
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def stop_in_order() -> None:
    """Make SIGTERM, SIGHUP and SIGINT run all `finally` blocks, which delete unfinished files."""
    handle((signal.SIGTERM, signal.SIGHUP), lambda number, _: sys.exit(128 + number))
    # Without this, a program that a shell starts in the background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def end_with_launcher() -> None:
    """Let Linux send LAUNCHER_ENDED to this process when its launcher ends, for example by SIGKILL.
    A process that no launcher has started goes on when its parent, such as a shell, ends."""
    if sys.platform == "linux" and any(mark in os.environ for mark in MARKS):
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, LAUNCHER_ENDED)
        if os.getppid() != launcher:  # it ended before the call
            signal.raise_signal(LAUNCHER_ENDED)


@contextmanager
def one_line_errors(program: str, *expected: type[Exception]) -> Iterator[None]:
    """Turn the expected exceptions and a full disk into one line and exit code 2. If the program
    that reads stdout has ended, as `head` does, this program ends without a message."""
    try:
        yield
        print(end="", flush=True)  # not sys.stdout.flush(): a shell may have closed stdout
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        broken = number in (errno.EPIPE, errno.EIO)  # EIO: of a terminal
        disk_full = number in (errno.ENOSPC, errno.EDQUOT)
        try:
            print(end="\n" * broken, flush=True)  # fails if it was stdout that is broken
        except OSError:  # discard the rest, which the interpreter would flush when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
            if broken:
                sys.exit(128 + signal.SIGPIPE)
        if not disk_full and not isinstance(error, expected):
            raise
        # Most errors are the same on every rank. So the first rank of a machine reports at once.
        # The other ranks wait, so that the launcher ends them before they print the same error.
        rank = int(os.environ.get("RANK", 0))
        if int(os.environ.get("LOCAL_RANK", rank)):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)
        message = one_line(error)
        if disk_full:
            message = f"no space left on the disk: {message}"
        elif "Traceback" in message:  # from a worker process: keep only the last line
            message = str(error).strip().splitlines()[-1].strip()
        if not isinstance(error, ReportedError):
            name = f"{program} (rank {rank})" if rank else program
            print(f"{name}: error: {message}", file=sys.stderr, flush=True)
        sys.exit(EXIT_CODE)
