"""A lock on the run folder, so that one run has one writer; it dies with its process."""

import errno
import fcntl
import os
import socket
from pathlib import Path

from common.errors import UsageError

_held: list[int] = []  # descriptors of the lock files


def lock(path: Path, otherwise: str = "--run_name") -> None:
    """Hold the folder of this lock file until `release_locks` or the process's end.

    The system drops such a lock with its process, so the file of a killed run is no obstacle.
    Processes forked off to read data do not inherit it: they outlive a killed parent by seconds.

    Raises UsageError: a live process holds the folder; `otherwise` is how to name another one.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            holder = path.read_text(encoding="utf-8", errors="replace")
            os.close(descriptor)
            raise UsageError(
                f"{path.parent} is in use by {holder}: wait for it, or take another {otherwise}"
            ) from error
        print(f"no locks on this file system ({error.strerror}): let no second run write here")
    _held.append(descriptor)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def release_locks() -> None:
    """Let go of every run folder, in a process that lives on after its runs."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=release_locks)
