"""One run, one writer: a lock on the run folder that dies with its process."""

import errno
import fcntl
import json
import os
import socket
from pathlib import Path

from common.errors import UsageError

_held: list[int] = []  # descriptors of the lock files


def lock(path: Path, otherwise: str = "--run_name") -> None:
    """Hold the folder of this lock file until `release_locks` or the process's end; `otherwise` is
    what another folder is named by.

    The system drops such a lock with its process, however that ends, so a killed run's file is no
    obstacle. Processes forked off to read data do not inherit it: they outlive a killed parent by
    seconds.

    Raises UsageError: a live process holds the folder; names it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            os.close(descriptor)
            raise UsageError(
                f"{path.parent} is in use by {_holder(path)}: wait for it, or take another "
                f"{otherwise}"
            ) from error
        print(f"no locks on this file system ({error.strerror}): let no second run write here")
    _held.append(descriptor)
    os.ftruncate(descriptor, 0)
    holder = {"pid": os.getpid(), "host": socket.gethostname()}
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def release_locks() -> None:
    """Let go of every run folder, in a process that lives on after its runs."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=release_locks)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
