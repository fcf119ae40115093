"""A write that fails or is killed leaves no incomplete file or folder under the final name."""

import errno
import os
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest
from conftest import error_of

from lm.common.atomic import (
    new_folder,
    one_at_a_time,
    remove,
    whole,
    whole_folder,
    write_whole,
)


def write(context, path: Path, text: str, error: type[BaseException] | None = None) -> None:
    """Write a file or a one-file folder; raise `error`, if given, before the rename.
    `context` is whole or whole_folder."""
    with context(path) as partial:
        (partial / "file" if partial.is_dir() else partial).write_text(text)
        if error:
            raise error


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def folder_of(path: Path, text: str) -> Path:
    """Make and return a folder with the text in its only file."""
    path.mkdir(parents=True)
    (path / "file").write_text(text)
    return path


def text_of(path: Path) -> str:
    """Return the text of a file, or of the only file in a folder, which must be named "file"."""
    if path.is_file():
        return path.read_text()
    assert names(path) == ["file"]
    return (path / "file").read_text()


@pytest.mark.parametrize("context", [whole, whole_folder])
def test_a_file_or_folder_appears_only_when_whole_and_replaces_an_older_one(tmp_path, context):
    with pytest.raises(KeyboardInterrupt):
        write(context, tmp_path / "new", "half", KeyboardInterrupt)
    assert names(tmp_path) == []
    for text in ("first", "second"):
        write(context, tmp_path / "new", text)
        with pytest.raises(KeyboardInterrupt):
            write(context, tmp_path / "new", "half", KeyboardInterrupt)
        assert names(tmp_path) == ["new"]
        assert text_of(tmp_path / "new") == text


def test_contents_are_synced_before_the_rename_and_the_parent_after_it(tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path, (tmp_path / "new").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_whole(tmp_path / "new", "第1句\n")
    assert synced == [(tmp_path / "new.partial", False), (tmp_path, True)]
    assert (tmp_path / "new").read_bytes() == "第1句\n".encode()
    (tmp_path / "new").unlink()
    synced.clear()
    with whole_folder(tmp_path / "new") as partial:
        (partial / "file").write_text("whole")
        folder_of(partial / "inside", "whole")
    *before, after = synced
    all_of_it = (partial, partial / "file", partial / "inside", partial / "inside" / "file")
    assert sorted(before) == sorted((path, False) for path in all_of_it)
    assert after == (tmp_path, True)


def test_a_folder_that_cannot_be_synced_is_accepted_but_no_disk_error(tmp_path, monkeypatch):
    real, refusal = os.fsync, OSError(errno.EINVAL, "not for folders")

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise refusal
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_whole(tmp_path / "new", "whole")
    assert text_of(tmp_path / "new") == "whole"
    refusal.errno = errno.EIO
    with pytest.raises(OSError, match="not for folders"):
        write_whole(tmp_path / "new", "more")


def test_the_next_write_deletes_the_leftovers_of_a_killed_process(tmp_path):
    """The process was killed while writing, after renaming the old folder, or while deleting it."""
    folder_of(tmp_path / "new.partial", "half")
    folder_of(tmp_path / "new.deleting", "old")
    folder_of(tmp_path / "newer.partial", "of another")
    with pytest.raises(KeyboardInterrupt):
        write(whole_folder, tmp_path / "new", "half", KeyboardInterrupt)
    assert names(tmp_path) == ["new.deleting", "newer.partial"]  # new.deleting may be the only copy
    write(whole_folder, tmp_path / "new", "whole")
    folder_of(tmp_path / "new.deleting", "older")
    write(whole_folder, tmp_path / "new", "newest")
    assert names(tmp_path) == ["new", "newer.partial"]
    assert text_of(tmp_path / "new") == "newest"


def test_a_folder_is_renamed_before_its_files_are_deleted(tmp_path, monkeypatch):
    folder_of(tmp_path / "doomed", "text")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **options: None)  # killed here
        remove(tmp_path / "doomed")
    assert names(tmp_path) == ["doomed.deleting"]
    folder_of(tmp_path / "doomed", "text")  # again, next to doomed.deleting
    (tmp_path / "file").touch()
    for name in ("doomed", "file", "file"):
        remove(tmp_path / name)
    assert names(tmp_path) == []


def new(out: Path, overwrite: bool = False) -> None:
    """Make a folder of the kind "heap"; a file "mine" identifies this kind."""
    with new_folder(out, "heap", lambda path: (path / "mine").exists(), overwrite) as partial:
        (partial / "mine").write_text("whole")


def test_only_an_empty_folder_or_one_of_the_same_kind_is_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    new(tmp_path / "out")
    (tmp_path / "out" / "more").touch()
    assert "exists: pass --overwrite to replace it" in error_of(new, tmp_path / "out")
    assert names(tmp_path / "out") == ["mine", "more"]
    new(tmp_path / "out", overwrite=True)
    assert names(tmp_path / "out") == ["mine"]
    folder_of(tmp_path / "other", "of a person")
    (tmp_path / "text").write_text("of a person")
    for name in ("other", "text", "other/.."):
        assert "exists and is no heap" in error_of(new, tmp_path / name, overwrite=True)
        assert text_of(tmp_path / "other") == "of a person"


def test_a_second_writer_of_the_same_folder_waits_and_says_so(tmp_path, capsys):
    out, came = tmp_path / "parent" / "new", []

    def make() -> None:
        with one_at_a_time(out):
            came.append("second")

    second = threading.Thread(target=make)
    with one_at_a_time(out):
        second.start()
        while not (said := capsys.readouterr().out) and second.is_alive():
            time.sleep(0.01)
        came.append("first")
    second.join()
    assert said == f"waiting for another process, which holds {out.with_name('.new.lock')}\n"
    assert came == ["first", "second"]
