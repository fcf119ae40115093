"""Token shards on disk: raw little-endian integers, described by one dataset.json beside them."""

import hashlib
import json
from pathlib import Path

import numpy as np

from data.errors import DataError

DESCRIPTION_FILE = "dataset.json"
FORMAT = 1
SPLITS = ("train", "val")
KINDS = TEXT, CONVERSATIONS = ("text", "conversations")
# Three numbers of this type per answer: the begin of its conversation, its own begin and its own
# end, as positions in the stream of all tokens.
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
    """Append documents to the shards of one split; a shard ends after shard_tokens tokens. The
    places of the answers in conversations go to a file of their own."""

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
        """Write one document with its begin and end pieces, and count its bytes of text.

        Args:
            answers: of a conversation: where each begins and ends in its tokens, (answers, 2).
        """
        if answers is not None:
            self._write_answers(answers)
        if self._file is None or self.shards[-1]["tokens"] >= self.shard_tokens:
            self._finish_shard()
            name = f"{self.split}-{len(self.shards):05d}.bin"
            self._file = _HashedFile(self.folder / name)
            self.shards.append({"file": name, "tokens": 0})
        self._file.write(tokens.astype(self.dtype, copy=False).tobytes())
        self.shards[-1]["tokens"] += len(tokens)
        self.documents += 1
        self.bytes += n_bytes
        self.tokens += len(tokens)

    def close(self) -> dict:
        """End the last file; return the description of this split."""
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

    def _finish_shard(self) -> None:
        if self._file is not None:
            self.shards[-1]["sha256"] = self._file.close()
            self._file = None


def read_description(folder: str | Path) -> dict:
    """Return the contents of a prepared folder's dataset.json, checked against the files beside it.
    "kind" is one of KINDS.

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
        description.setdefault("kind", TEXT)  # older ones do not say it
        if description["format"] != FORMAT:
            raise DataError(f"{path}: this version reads format {FORMAT} of prepared data")
        for split in SPLITS:
            _check_split(folder, description, split)
    except FileNotFoundError as error:
        raise DataError(
            f"{folder}: no prepared data here ({DESCRIPTION_FILE} is missing); make it with "
            f"`python -m scripts.prepare_data --data TEXT --out {folder}`"
        ) from error
    except DataError:
        raise
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not a description of token shards ({type(error).__name__}: {error})"
        ) from error
    return description


def _check_split(folder: Path, description: dict, split: str) -> None:
    """Raises DataError: the description contradicts itself, or a file is not as long as it says.
    TypeError and others: it has another form."""
    part, vocab_size = description["splits"][split], description["vocab_size"]
    dtype = token_dtype(vocab_size)
    for shard in part["shards"]:
        _check_file(folder, shard["file"], shard["tokens"], dtype.itemsize)
    numbers = [vocab_size, part["tokens"], part["bytes"]]
    sound = all(type(number) is int for number in numbers) and vocab_size > 0
    sound &= description["dtype"] == dtype.str and description["kind"] in KINDS
    sound &= part["tokens"] == sum(shard["tokens"] for shard in part["shards"])
    sound &= part["bytes"] >= min(part["tokens"], 1)
    if part["tokens"] and description["kind"] == CONVERSATIONS:
        answers = part["answers"]
        _check_file(folder, answers["file"], answers["count"], 3 * ANSWER_DTYPE.itemsize)
        sound &= type(answers["tokens"]) is int and 0 < answers["tokens"] < part["tokens"]
    if not sound:
        raise DataError(
            f"{folder / DESCRIPTION_FILE}: contradicts itself about the {split} split: the file is "
            "damaged; prepare the data again"
        )


def _check_file(folder: Path, name: str, count: int, itemsize: int) -> None:
    """Raises DataError: the file does not hold `count` items of so many bytes."""
    path = folder / name
    if path.parent != folder or type(count) is not int or count < 1:
        raise DataError(f"{folder / DESCRIPTION_FILE}: no shard is {name!r}, {count!r} items long")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: this token shard is missing; prepare the data again") from error
    if size != count * itemsize:
        raise DataError(
            f"{path}: {size} bytes long, but {count} items take {count * itemsize}: "
            "cut short or foreign; prepare the data again"
        )
