"""A user's mistake ends a program with one line and exit code 2, never with a traceback."""

import argparse
import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 2


class UsageError(ValueError):
    """Flags, files or launcher settings that cannot work, or contradict each other."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are a UsageError instead of a page about usage."""

    def error(self, message: str):
        raise UsageError(f"{message} (see --help)")


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
