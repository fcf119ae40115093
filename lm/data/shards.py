"""Token shards on disk: files of little-endian integers, and dataset.json, which describes them."""

import hashlib
import json
from pathlib import Path

import numpy as np

from lm.common.errors import UsageError

DESCRIPTION_FILE = "dataset.json"
FORMAT = 1
SPLITS = ("train", "val")
KINDS = TEXT, CONVERSATIONS = ("text", "conversations")
# An answer is stored as three positions in the stream of tokens: the start of its conversation,
# the start of the answer, and the end of the answer.
ANSWER_DTYPE = np.dtype("<i8")


def token_dtype(vocab_size: int) -> np.dtype:
    """Return little-endian uint16 for up to 65,535 pieces, uint32 for more."""
    return np.dtype("<u2") if vocab_size <= 65_535 else np.dtype("<u4")


class ShardWriter:
    """Write the documents of one split into shards, and the positions of answers into one file.
    A shard ends after the document that brings it to shard_tokens tokens or more."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int):
        self.folder = folder
        self.split = split
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.documents = self.bytes = self.tokens = 0
        self.shards: list[dict] = []
        self.answers = {"file": f"{split}-answers.bin", "count": 0, "tokens": 0}
        self._files: dict[str, tuple] = {}  # name → (open file, SHA-256 of its content)

    def write(self, tokens: np.ndarray, n_bytes: int, answers: np.ndarray | None = None) -> None:
        """Write the tokens of one document, whose text has n_bytes bytes.
        Row i of `answers`, (n, 2), is start and end of answer i, as indices into `tokens`."""
        if answers is not None:
            positions = np.pad(answers, ((0, 0), (1, 0))) + self.tokens  # (n, 3)
            self._append(self.answers["file"], positions.astype(ANSWER_DTYPE))
            self.answers["count"] += len(answers)
            self.answers["tokens"] += int(np.diff(answers).sum())
        if not self.shards or self.shards[-1]["tokens"] >= self.shard_tokens:
            name = f"{self.split}-{len(self.shards):05d}.bin"
            self.shards.append({"file": name, "tokens": 0})
        self._append(self.shards[-1]["file"], tokens.astype(self.dtype, copy=False))
        self.shards[-1]["tokens"] += len(tokens)
        self.documents += 1
        self.bytes += n_bytes
        self.tokens += len(tokens)

    def close(self) -> dict:
        """Close the files, and return the description of this split."""
        for listed in [*self.shards, *([self.answers] if self.answers["count"] else [])]:
            file, sha256 = self._files[listed["file"]]
            file.close()
            listed["sha256"] = sha256.hexdigest()
        description = {
            "documents": self.documents,
            "bytes": self.bytes,
            "tokens": self.tokens,
            "shards": self.shards,
        }
        return description | ({"answers": self.answers} if self.answers["count"] else {})

    def _append(self, name: str, array: np.ndarray) -> None:
        if name not in self._files:
            self._files[name] = open(self.folder / name, "wb"), hashlib.sha256()  # noqa: SIM115
        file, sha256 = self._files[name]
        file.write(array)
        sha256.update(array)


def read_description(folder: str | Path) -> dict:
    """Read dataset.json. Raises UsageError if it is damaged or missing."""
    folder = Path(folder)
    path = folder / DESCRIPTION_FILE
    if not path.is_file():
        flags = f"--data {folder}" if folder.is_file() else f"--data FILE --out {folder}"
        raise UsageError(
            f"{folder}: no prepared data here, {DESCRIPTION_FILE} is missing; prepare it with "
            f"`python -m scripts.prepare_data {flags}` (conversations: see --help)"
        )
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        description.setdefault("kind", TEXT)
        _check(folder, description)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        problem = f"damaged or another version ({type(error).__name__}: {error})"
        raise UsageError(f"{path}: {problem}: prepare the data again") from error
    return description


def _check(folder: Path, description: dict) -> None:
    """Raise an error if the format is unknown, or if a file's size differs from the description."""
    dtype = token_dtype(description["vocab_size"])
    known = description["format"] == FORMAT and description["kind"] in KINDS
    if not known or description["dtype"] != dtype.str:
        raise ValueError("a format that this version does not know")
    for split in SPLITS:
        part = description["splits"][split]
        sizes = {shard["file"]: shard["tokens"] * dtype.itemsize for shard in part["shards"]}
        if "answers" in part:
            sizes[part["answers"]["file"]] = part["answers"]["count"] * 3 * ANSWER_DTYPE.itemsize
        for name, size in sizes.items():
            if (found := (folder / name).stat().st_size) != size:
                raise ValueError(f"{name} has {found} bytes, not {size}")
