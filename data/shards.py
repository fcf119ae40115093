"""Token shards on disk: raw little-endian integers, described by one dataset.json beside them."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np

from data.errors import DataError

DESCRIPTION_FILE = "dataset.json"
FORMAT = 1
SPLITS = ("train", "val")
KINDS = TEXT, CONVERSATIONS = ("text", "conversations")
# The begin of a conversation, the begin and the end of one of its answers, as positions in the
# stream of all tokens: three numbers of this type per answer.
ANSWER_DTYPE = np.dtype("<i8")


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 while every id fits, uint32 beyond; little-endian on every machine."""
    return np.dtype("<u2") if vocab_size <= 65_535 else np.dtype("<u4")


class _HashedFile:
    """A file to write, and its SHA-256."""

    def __init__(self, path: Path):
        self._file = open(path, "wb")  # noqa: SIM115, closed in close()
        self._sha256 = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha256.update(data)

    def close(self) -> str:
        self._file.close()
        return self._sha256.hexdigest()


class ShardWriter:
    """Appends documents to the shards of one split; a file ends after shard_tokens tokens. Where
    answers are in conversations stands in one more file."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int):
        self.folder = folder
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.documents = self.bytes = self.tokens = 0
        self.shards: list[dict] = []
        self.answers = {"file": f"{split}-answers.bin", "count": 0, "tokens": 0}
        self._file: _HashedFile | None = None
        self._answers: _HashedFile | None = None

    def write(self, tokens: np.ndarray, n_bytes: int, answers: np.ndarray | None = None) -> None:
        """One document with its begin and end pieces, and how many bytes of text it was.

        Args:
            answers: of a conversation: where each begins and ends in its tokens, (answers, 2).
        """
        if answers is not None:
            self._write_answers(answers)
        if self._file is None or self.shards[-1]["tokens"] >= self.shard_tokens:
            self._start_shard()
        data = tokens.astype(self.dtype, copy=False).tobytes()
        self._file.write(data)
        self.shards[-1]["tokens"] += len(tokens)
        self.documents += 1
        self.bytes += n_bytes
        self.tokens += len(tokens)

    def close(self) -> dict:
        """End the last file; returns the description of this split."""
        self._finish_shard()
        description = {
            "documents": self.documents,
            "bytes": self.bytes,
            "tokens": self.tokens,
            "shards": self.shards,
        }
        if self._answers is None:
            return description
        return description | {"answers": self.answers | {"sha256": self._answers.close()}}

    def _write_answers(self, answers: np.ndarray) -> None:
        self._answers = self._answers or _HashedFile(self.folder / self.answers["file"])
        positions = np.pad(answers, ((0, 0), (1, 0))) + self.tokens  # (answers, 3)
        self._answers.write(positions.astype(ANSWER_DTYPE).tobytes())
        self.answers["count"] += len(answers)
        self.answers["tokens"] += int(np.diff(answers).sum())

    def _start_shard(self) -> None:
        self._finish_shard()
        name = f"{self.split}-{len(self.shards):05d}.bin"
        self._file = _HashedFile(self.folder / name)
        self.shards.append({"file": name, "tokens": 0})

    def _finish_shard(self) -> None:
        if self._file is not None:
            self.shards[-1]["sha256"] = self._file.close()
            self._file = None


def read_description(folder: str | Path) -> dict:
    """The contents of a prepared folder's dataset.json, checked against the files beside it.

    Raises DataError: no prepared data there, a description that makes no sense, a shard missing or
    cut short.
    """
    folder = Path(folder)
    path = folder / DESCRIPTION_FILE
    if folder.is_file():
        raise DataError(
            f"{folder}: a file; text has to be prepared first, with "
            f"`python -m scripts.prepare_data --data {folder}`"
        )
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(
            f"{folder}: no prepared data here ({DESCRIPTION_FILE} is missing); make it with "
            f"`python -m scripts.prepare_data --data TEXT --out {folder}`"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    try:
        if description["format"] != FORMAT:
            raise DataError(
                f"{path}: format {description['format']!r}, this version reads format {FORMAT}"
            )
        if type(description["vocab_size"]) is not int or description["vocab_size"] < 1:
            raise DataError(f"{path}: vocab_size is {description['vocab_size']!r}")
        if description["dtype"] != token_dtype(description["vocab_size"]).str:
            raise DataError(f"{path}: dtype {description['dtype']!r} does not suit the vocabulary")
        if kind_of(description) not in KINDS:
            raise DataError(f"{path}: kind {description['kind']!r} is not known to this version")
        itemsize = token_dtype(description["vocab_size"]).itemsize
        for split in SPLITS:
            for shard in description["splits"][split]["shards"]:
                _check_shard(folder, shard["file"], shard["tokens"], itemsize)
            total = sum(shard["tokens"] for shard in description["splits"][split]["shards"])
            said = description["splits"][split]["tokens"]
            if type(said) is not int or total != said:
                raise DataError(
                    f"{path}: the {split} shards hold {total} tokens, not what it says in all"
                )
            n_bytes = description["splits"][split]["bytes"]
            if type(n_bytes) is not int or n_bytes < min(total, 1):
                raise DataError(f"{path}: the {split} split has {n_bytes!r} bytes of text")
            if total and kind_of(description) == CONVERSATIONS:
                answers = description["splits"][split]["answers"]
                _check_shard(folder, answers["file"], answers["count"], 3 * ANSWER_DTYPE.itemsize)
                if type(answers["tokens"]) is not int or not 0 < answers["tokens"] < total:
                    raise DataError(f"{path}: {answers['tokens']!r} tokens of answers in {split}")
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(
            f"{path}: not a description of token shards ({type(error).__name__}: {error})"
        ) from error
    return description


def kind_of(description: dict) -> str:
    """What a prepared folder holds, one of KINDS. Before there was a choice, it was text."""
    return description.get("kind", TEXT)


def _check_shard(folder: Path, name: str, count: int, itemsize: int) -> None:
    """Of `count` items, which are tokens or answers."""
    path = folder / name
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise DataError(f"{folder / DESCRIPTION_FILE}: {name!r} is no name of a shard")
    if type(count) is not int or count < 1:
        raise DataError(f"{path}: described as {count!r} items long")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: this token shard is missing; prepare the data again") from error
    if size != count * itemsize:
        raise DataError(
            f"{path}: {size} bytes long, but {count} items take {count * itemsize}: "
            "cut short or foreign; prepare the data again"
        )
