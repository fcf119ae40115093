"""Write whole files and folders: under a temporary name, forced to the disk, then renamed.

Only one process may write a path at a time. If a writer was killed, the next writer
replaces its unfinished files.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

from lm.common.errors import UsageError

PARTIAL = ".partial"  # suffix of the temporary name of a path that is being written
DELETING = ".deleting"  # suffix of the temporary name of a path that is being deleted


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or a folder; then rename it, which replaces `path`."""
    partial, old = (path.with_name(path.name + suffix) for suffix in (PARTIAL, DELETING))
    remove(partial)  # left by a process that was killed
    try:
        yield partial
        for each in (*partial.rglob("*"), partial):
            sync(each)
        if partial.is_dir() and path.exists():
            remove(old)
            path.rename(old)
        partial.replace(path)
        sync(path.parent)
        remove(old)
    finally:
        remove(partial)


def write_whole(path: Path, content: str) -> None:
    """Write a text file atomically."""
    with whole(path) as partial:
        partial.write_text(content, encoding="utf-8")


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Make a temporary folder and yield it, as `whole` does."""
    with whole(out) as partial:
        partial.mkdir(parents=True)
        yield partial


def new_folder(
    out: Path, what: str, is_one: Callable[[Path], bool], overwrite: bool
) -> AbstractContextManager[Path]:
    """Call `whole_folder` for a folder that is a `what`, which `is_one` recognises. Raises
    UsageError if `out` is a file, holds other things, or is a `what` and `overwrite` is False."""
    out = out.resolve()
    if out.is_file() or (out.exists() and any(out.iterdir())):
        if out.is_file() or not is_one(out):
            raise UsageError(f"{out} exists and is no {what}: choose another folder")
        if not overwrite:
            raise UsageError(f"{out} exists: pass --overwrite to replace it")
    return whole_folder(out)


@contextmanager
def one_at_a_time(out: Path) -> Iterator[None]:
    """Let only one process at a time run a context for `out`. The other processes wait."""
    path = out.with_name(f".{out.name}.lock")
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        if not try_lock(file):
            print(f"waiting for another process, which holds {path}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def try_lock(file: IO | int) -> bool:
    """Lock an open file until it is closed. Return False if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        print(f"this file system has no locks ({error.strerror}): do not start this program twice")
    return True


def sync(path: Path) -> None:
    """Make the system write the contents of a file or folder to the disk now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems, such as Windows' in WSL, cannot sync a folder
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file or folder. A folder is renamed first, so `path` never names a part of it."""
    with suppress(OSError):
        if not path.is_dir():
            path.unlink()
        elif path.suffix != DELETING:
            doomed = path.with_name(path.name + DELETING)
            shutil.rmtree(doomed, ignore_errors=True)
            path = path.rename(doomed)
        shutil.rmtree(path, ignore_errors=True)
