"""A user's mistake ends a program with one line and exit code 2, never with a traceback."""

import argparse
import difflib
import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 2


class UsageError(ValueError):
    """Flags, files or launcher settings that cannot work, or contradict each other."""


LAUNCHER_FLAGS = (
    *("--num_processes", "--mixed_precision", "--main_process_port", "--config_file"),
    *("--multi_gpu", "--use_deepspeed", "--deepspeed_config_file", "--machine_rank", "--cpu"),
)


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are a UsageError, with a guess at what was meant."""

    def error(self, message: str):
        raise UsageError(f"{message} (see --help)")

    def parse_args(self, args=None, namespace=None):
        values, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized argument {unknown[0]}{self._guess(unknown[0])}")
        return values

    def _guess(self, unknown: str) -> str:
        flag = unknown.partition("=")[0]
        if flag in LAUNCHER_FLAGS:
            return ": it belongs to accelerate launch, before the name of the script"
        if not flag.startswith("-"):
            return f": text is given as DATA={flag} or --data {flag}"
        known = [name for action in self._actions for name in action.option_strings]
        close = difflib.get_close_matches(flag, known, n=1)
        return f": did you mean {close[0]}?" if close else ""


@contextmanager
def one_line_errors(program: str, *expected: type[Exception]) -> Iterator[None]:
    """Turn the expected exceptions, and a full disk, into one line on stderr and exit code 2."""
    try:
        yield
    except Exception as error:
        disk_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not disk_full and not isinstance(error, expected):
            raise
        message = f"no space left on the disk: {error}" if disk_full else str(error)
        # Most errors are the same on every rank: rank 0 says them and the launcher then stops the
        # others.
        rank = int(os.environ.get("RANK", 0))
        if rank:
            time.sleep(3)
            program = f"{program} (rank {rank})"
        sys.stdout.flush()
        if "Traceback" in message:  # of a worker process; the message comes last
            message = message.strip().splitlines()[-1]
        message = " ".join(message.split()) or type(error).__name__
        print(f"{program}: error: {message}", file=sys.stderr, flush=True)
        sys.exit(EXIT_CODE)
