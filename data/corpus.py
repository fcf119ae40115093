"""Raw text: which files a corpus consists of, and the documents in them.

- `.jsonl` and `.jsonl.gz`: one JSON object per line, the document under "text" (MiniMind's format).
- `.txt`: one document; a file longer than SECTION_BYTES is cut at line ends into sections that each
  count as one document, so that a single large file still has a validation split and never has to
  fit in memory.
- a folder: all such files below it, in sorted order.
- "builtin": the Python standard library's own source, there wherever Python is, about 12 MB without
  its tests.
"""

import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data.errors import DataError

BUILTIN = "builtin"
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz")
SECTION_BYTES = 16 * 1024
SAVE_HINT = "save it as UTF-8 (for Chinese text often: iconv -f gb18030 -t utf-8)"
# Not text that somebody wrote: tests hold deliberate nonsense, the rest is installed packages and
# caches.
NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Record(NamedTuple):
    """One document as it stands in its file, not yet decoded."""

    path: str
    position: int  # number of the line in a .jsonl file, offset of the first byte in any other
    raw: bytes

    @property
    def place(self) -> str:
        return f"{self.path}, {'line' if is_jsonl(self.path) else 'byte'} {self.position}"


def is_jsonl(path: str) -> bool:
    return path.endswith((".jsonl", ".jsonl.gz"))


def find_files(source: str) -> list[str]:
    """The files of a corpus: of a file, a folder, or "builtin".

    Raises DataError: nothing there, or nothing of a kind that can be read.
    """
    if source == BUILTIN:
        return _builtin_files()
    path = Path(source)
    try:
        path.stat()
    except OSError as error:
        raise DataError(f"{source}: no such file or folder ({error.strerror})") from error
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise DataError(
                f"{source}: cannot read this kind of file; use one of {', '.join(SUFFIXES)}"
            )
        return [str(path)]
    if path.is_dir():
        files = sorted(str(p) for p in path.rglob("*") if p.name.endswith(SUFFIXES) and p.is_file())
        if not files:
            raise DataError(f"{source}: no {', '.join(SUFFIXES)} file in this folder")
        return files
    raise DataError(f"{source}: no such file or folder")


def _builtin_files() -> list[str]:
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - NOT_CORPUS)
        files += (os.path.join(folder, name) for name in sorted(names) if name.endswith(".py"))
    if sum(map(os.path.getsize, files)) < 1_000_000:
        raise DataError(
            "this Python comes without the source of its standard library: give a text of your own"
        )
    return files


def read_records(files: Iterable[str]) -> Iterator[Record]:
    """Every document of every file, in order, in memory bounded by one line or section. Raises
    DataError: a file cannot be opened, or is no sound gzip file."""
    for path in files:
        try:
            with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
                yield from _lines(path, file) if is_jsonl(path) else _sections(path, file)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error


def _lines(path: str, file) -> Iterator[Record]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield Record(path, number, line)


def _sections(path: str, file) -> Iterator[Record]:
    offset, rest = 0, b""
    while block := file.read(SECTION_BYTES):
        rest += block
        while len(rest) > SECTION_BYTES:  # else perhaps the file ends here, in one section
            cut = rest.rfind(b"\n", 0, SECTION_BYTES) + 1
            if not cut:  # one very long line: cut between two characters
                cut = SECTION_BYTES
                while cut > SECTION_BYTES - 4 and rest[cut] & 0xC0 == 0x80:  # inside a character
                    cut -= 1
            yield Record(path, offset, rest[:cut])
            offset, rest = offset + cut, rest[cut:]
    if rest:
        yield Record(path, offset, rest)


def parse(record: Record) -> str:
    """The text of a document. Raises DataError: invalid UTF-8, a line that is not JSON, or JSON
    without a text; names file and place."""
    if not is_jsonl(record.path):
        return decode(record)
    document = load_json(record)
    if not isinstance(document, dict) or not isinstance(document.get("text"), str):
        raise DataError(f'{record.place}: no "text" with a string in it')
    refuse_half_characters(record, document["text"])
    return document["text"]


def decode(record: Record) -> str:
    """The record as characters, without a byte order mark at the start of its file. Raises
    DataError: invalid UTF-8; names file and place."""
    try:
        return record.raw.decode(
            "utf-8-sig" if record.position == is_jsonl(record.path) else "utf-8"
        )
    except UnicodeDecodeError as error:
        start = error.start + len(record.raw) - len(error.object)  # which has no byte order mark
        if is_jsonl(record.path):
            what = f"{record.place}: not valid UTF-8 ({error.reason} at its byte {start})"
        else:
            place = f"{record.path}, byte {record.position + start}"
            what = f"{place}: not valid UTF-8 ({error.reason}): {SAVE_HINT}"
        raise DataError(what) from error


def load_json(record: Record) -> Any:
    """What a line of a .jsonl file holds. Raises DataError: invalid UTF-8 or a line that is not
    JSON; names file and place."""
    text = decode(record)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{record.place}: not JSON ({error})") from error


def refuse_half_characters(record: Record, text: str) -> None:
    """Raises DataError: JSON can spell half a surrogate pair, and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{record.place}: half a surrogate pair, which is no character") from error
