"""Files and folders that are whole or not there: written aside, forced to the disk, renamed."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from common.errors import UsageError

DOOMED = ".deleting-"  # begins the names of files and folders that are being deleted


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a name beside `path` to write to; it becomes `path` at the end, or goes after an
    error."""
    _remove_abandoned(path)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file by way of `whole_file`."""
    with whole_file(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Give a folder beside `out` to write into; it replaces `out` at the end, or goes after an
    error. Leftovers of killed processes are deleted as well."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(out)
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        for folder, _, names in os.walk(partial):
            for name in names:
                sync(Path(folder, name))
            sync(Path(folder))
        old = _doomed(out)
        if out.exists():
            out.rename(old)
        partial.rename(out)
        sync(out.parent)
        remove(old)
    finally:
        remove(partial)


@contextmanager
def new_folder(
    out: Path, what: str, is_one: Callable[[Path], bool], overwrite: bool
) -> Iterator[Path]:
    """Call `whole_folder` for a place that a person has named.

    Raises UsageError: something is there that is no `what` (as in "export") by `is_one`, or that
    must not be replaced without `overwrite`.
    """
    if out.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise UsageError(f"{out} is the working folder or above it: choose another")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: choose another name")
    if out.is_dir() and any(out.iterdir()):
        if not is_one(out):
            raise UsageError(f"{out} exists and is no {what}: choose another folder")
        if not overwrite:
            raise UsageError(f"{out} exists: pass --overwrite to replace it")
    with whole_folder(out) as partial:
        yield partial


@contextmanager
def one_at_a_time(out: Path) -> Iterator[None]:
    """Wait until no other process, on any machine with this disk, is making `out`.

    Look for `out` only then. The lock file beside it stays.
    """
    path = out.with_name(f".{out.name}.lock")
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process, which holds {path}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            print(f"no locks on this file system ({error.strerror}): start no second such process")
        yield


def sync(path: Path) -> None:
    """Force a file's or folder's contents from the system's memory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems cannot do this for folders
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a folder or a file, as far as the system permits. A folder is renamed first: killed
    halfway, nothing of the old name is there."""
    with suppress(OSError):
        if not path.is_dir():
            path.unlink(missing_ok=True)
            return
        if path != _doomed(path):
            path = path.rename(_doomed(path))
        shutil.rmtree(path, ignore_errors=True)


def _doomed(path: Path) -> Path:
    """Return the name of a file or folder while it is being deleted."""
    if path.name.startswith(DOOMED):
        return path
    return path.with_name(f"{DOOMED}{path.name}-{os.getpid()}")


def _remove_abandoned(out: Path) -> None:
    """Delete what processes that no longer run were writing, or had not deleted yet."""
    leftovers = list(out.parent.glob(f"{escape(out.name)}.partial-*"))
    if out.exists():  # an old folder goes only when the new one is there
        leftovers += out.parent.glob(f"{DOOMED}{escape(out.name)}-*")
    for leftover in leftovers:
        pid = leftover.name.rpartition("-")[2]
        # Our own number: in a container every run may have the same one.
        lives = pid != str(os.getpid()) and Path(f"/proc/{pid}").exists()
        if pid.isdigit() and Path("/proc").exists() and not lives:
            remove(leftover)
