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
    """Return the contents of a prepared folder's dataset.json. "kind" is one of KINDS.

    Raises DataError: no prepared data there, a file of another size than the description says, or a
    description that contradicts itself.
    """
    folder = Path(folder)
    path = folder / DESCRIPTION_FILE
    if not path.is_file():
        source, out = (folder, "") if folder.is_file() else ("TEXT", f" --out {folder}")
        raise DataError(
            f"{folder}: no prepared data here ({DESCRIPTION_FILE} is missing); make it with "
            f"`python -m scripts.prepare_data --data {source}{out}`"
        )
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        description.setdefault("kind", TEXT)  # older ones do not say it
        problem = _contradiction(folder, description)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise DataError(f"{path}: damaged or another version ({problem}): prepare the data again")
    return description


def _contradiction(folder: Path, description: dict) -> str | None:
    """Return the first statement of a description that the files or the rest of it contradict.
    Raises OSError, LookupError, TypeError: a file or a statement is missing."""
    dtype = token_dtype(description["vocab_size"])
    if description["format"] != FORMAT or description["kind"] not in KINDS:
        return f"format {description['format']} of {description['kind']!r}"
    for split in SPLITS:
        part = description["splits"][split]
        sizes = {shard["file"]: shard["tokens"] * dtype.itemsize for shard in part["shards"]}
        if "answers" in part:
            sizes[part["answers"]["file"]] = part["answers"]["count"] * 3 * ANSWER_DTYPE.itemsize
        for name, size in sizes.items():
            if (found := (folder / name).stat().st_size) != size:
                return f"{name} has {found} bytes, not {size}"
        tokens = sum(shard["tokens"] for shard in part["shards"])
        if part["tokens"] != tokens or description["dtype"] != dtype.str:
            return f"{part['tokens']} tokens of {split} as {description['dtype']}"
    return None
