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

DOOMED = ".deleting-"  # how names begin of what is being deleted


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to. It becomes `path` at the end, or goes if that is not
    reached."""
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
    """The same for what is in memory."""
    with whole_file(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write into. It becomes `out` at the end, in the place of what was
    there, or goes if that is not reached. What killed processes left of theirs goes as well."""
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
    """`whole_folder`, where a person may have named a place that holds something else: a folder
    that exists is only replaced if `is_one` knows it for a `what`, as in "export". Raises
    UsageError: `out` must not be replaced."""
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
    """Around making `out`: whoever else wants to, on any machine that has this disk, waits for its
    turn. Look for `out` only then."""
    path = out.with_name(f".{out.name}.lock")
    out.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int:
    """A descriptor that holds the lock on this file, which its last holder deletes."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process, which holds {path}", flush=True)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass  # deleted meanwhile: whoever comes now makes a new one
        except OSError as error:
            print(f"no locks on this file system ({error.strerror}): start no second such process")
            return descriptor
        os.close(descriptor)


def sync(path: Path) -> None:
    """Have a file's or folder's contents on the disk, not in the system's memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems know of no such thing for folders
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a folder or a file, as far as the system lets it go. Killed halfway, a folder has lost
    its name before it lost a file."""
    with suppress(OSError):
        if not path.is_dir():
            path.unlink(missing_ok=True)
            return
        if path != _doomed(path):
            path = path.rename(_doomed(path))
        shutil.rmtree(path, ignore_errors=True)


def _doomed(path: Path) -> Path:
    """A name that nobody gives to anything, for what is being deleted."""
    if path.name.startswith(DOOMED):
        return path
    return path.with_name(f"{DOOMED}{path.name}-{os.getpid()}")


def _remove_abandoned(out: Path) -> None:
    """What processes that no longer run were writing, and what they had not deleted yet."""
    leftovers = list(out.parent.glob(f"{escape(out.name)}.partial-*"))
    if out.exists():  # what is to be replaced goes only when the new one has come
        leftovers += out.parent.glob(f"{DOOMED}{escape(out.name)}-*")
    for leftover in leftovers:
        pid = leftover.name.rpartition("-")[2]
        # Our own number: in a container every run may have the same one.
        lives = pid != str(os.getpid()) and Path(f"/proc/{pid}").exists()
        if pid.isdigit() and Path("/proc").exists() and not lives:
            remove(leftover)
