"""One run, one writer: a lock on the run folder that dies with its process."""

import errno
import fcntl
import json
import os
import socket
from pathlib import Path

from common.errors import UsageError

_held: list["RunLock"] = []


class RunLock:
    """Holds a run folder until `release_locks` or the process's end, whatever becomes of it itself.

    The system drops such a lock with its process, however that ends, so a killed run's file is no
    obstacle.
    Processes forked off to read data do not inherit it: they outlive a killed parent by seconds.

    Raises UsageError: a live process holds the folder; names it.
    """

    def __init__(self, path: Path):
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(self._descriptor)
                raise UsageError(
                    f"{path.parent} is in use by {_holder(path)}: wait for it, or take another "
                    "--run_name"
                ) from error
            print(f"no locks on this file system ({error.strerror}): let no second run write here")
        _held.append(self)
        os.register_at_fork(after_in_child=self.release)
        os.ftruncate(self._descriptor, 0)
        holder = {"pid": os.getpid(), "host": socket.gethostname()}
        os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)

    def release(self) -> None:
        if self._descriptor is not None:  # once: a child of a child may use the number again
            os.close(self._descriptor)
            self._descriptor = None


def release_locks() -> None:
    """Let go of every run folder, in a process that lives on after its runs."""
    while _held:
        _held.pop().release()


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
