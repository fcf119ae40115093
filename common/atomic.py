"""Files and folders that are whole or not there: written aside, forced to the disk, renamed."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from common.errors import UsageError


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
        old = out.with_name(f"{out.name}.old-{os.getpid()}")
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
    """`whole_folder`, where a person may have named a place that holds something else.

    Args:
        what: what the folder will be, as in "export".
        is_one: whether a folder that exists is such a thing; nothing else is ever replaced.

    Raises UsageError: `out` must not be replaced.
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


def sync(path: Path) -> None:
    """Have a file's or folder's contents on the disk, not in the system's memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a folder or a file. Killed halfway, it has lost its name before it lost a file."""
    if path.is_file():
        path.unlink()
    elif path.is_dir() and ".old-" not in path.name:
        path = path.rename(path.with_name(f"{path.name}.old-{os.getpid()}"))
    shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(out: Path) -> None:
    """What processes that no longer run were writing, and old ones where the new one is there."""
    for kind in ("partial", "old") if out.exists() else ("partial",):
        for leftover in out.parent.glob(f"{escape(out.name)}.{kind}-*"):
            pid = leftover.name.rpartition("-")[2]
            # Our own number: in a container every run may have the same one.
            lives = pid != str(os.getpid()) and Path(f"/proc/{pid}").exists()
            if pid.isdigit() and Path("/proc").exists() and not lives:
                remove(leftover)
