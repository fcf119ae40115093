"""A folder that is written aside and takes its name when it is whole."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from training.errors import UsageError


@contextmanager
def new_folder(
    out: Path, what: str, is_one: Callable[[Path], bool], overwrite: bool
) -> Iterator[Path]:
    """A folder beside `out` to write into. It becomes `out` at the end, or goes if that is not
    reached.

    Args:
        what: what the folder will be, as in "export".
        is_one: whether a folder that exists is such a thing; nothing else is ever replaced.

    Raises:
        UsageError: `out` must not be replaced.
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
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        old = out.with_name(f"{out.name}.old-{os.getpid()}")
        if out.exists():
            out.rename(old)
        partial.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
