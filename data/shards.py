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


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 while every id fits, uint32 beyond; little-endian on every machine."""
    return np.dtype("<u2") if vocab_size <= 65_535 else np.dtype("<u4")


class ShardWriter:
    """Appends documents to the shards of one split; a file ends after shard_tokens tokens."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int):
        self.folder = folder
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.documents = self.bytes = self.tokens = 0
        self.shards: list[dict] = []
        self._file = None

    def write(self, tokens: np.ndarray, n_bytes: int) -> None:
        """One document with its begin and end pieces, and how many bytes of text it was."""
        if self._file is None or self.shards[-1]["tokens"] >= self.shard_tokens:
            self._start_shard()
        data = tokens.astype(self.dtype, copy=False).tobytes()
        self._file.write(data)
        self._sha256.update(data)
        self.shards[-1]["tokens"] += len(tokens)
        self.documents += 1
        self.bytes += n_bytes
        self.tokens += len(tokens)

    def close(self) -> dict:
        """End the last file; returns the description of this split."""
        self._finish_shard()
        return {
            "documents": self.documents,
            "bytes": self.bytes,
            "tokens": self.tokens,
            "shards": self.shards,
        }

    def _start_shard(self) -> None:
        self._finish_shard()
        name = f"{self.split}-{len(self.shards):05d}.bin"
        self._file = open(self.folder / name, "wb")  # noqa: SIM115, closed when the shard is full
        self._sha256 = hashlib.sha256()
        self.shards.append({"file": name, "tokens": 0})

    def _finish_shard(self) -> None:
        if self._file is not None:
            self._file.close()
            self.shards[-1]["sha256"] = self._sha256.hexdigest()
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
        itemsize = token_dtype(description["vocab_size"]).itemsize
        for split in SPLITS:
            for shard in description["splits"][split]["shards"]:
                if not re.fullmatch(r"[\w.-]+", shard["file"], re.ASCII):
                    raise DataError(f"{path}: {shard['file']!r} is no name of a shard")
                _check_shard(folder / shard["file"], shard["tokens"], itemsize)
            total = sum(shard["tokens"] for shard in description["splits"][split]["shards"])
            said = description["splits"][split]["tokens"]
            if type(said) is not int or total != said:
                raise DataError(
                    f"{path}: the {split} shards hold {total} tokens, not what it says in all"
                )
            n_bytes = description["splits"][split]["bytes"]
            if type(n_bytes) is not int or n_bytes < min(total, 1):
                raise DataError(f"{path}: the {split} split has {n_bytes!r} bytes of text")
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(
            f"{path}: not a description of token shards ({type(error).__name__}: {error})"
        ) from error
    return description


def _check_shard(path: Path, tokens: int, itemsize: int) -> None:
    if type(tokens) is not int or tokens < 1:
        raise DataError(f"{path}: described as {tokens!r} tokens long")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: this token shard is missing; prepare the data again") from error
    if size != tokens * itemsize:
        raise DataError(
            f"{path}: {size} bytes long, but {tokens} tokens take {tokens * itemsize}: "
            "cut short or foreign; prepare the data again"
        )
