"""Token shards on disk: files of little-endian integers, and dataset.json, which describes them."""

import hashlib
import json
from pathlib import Path

import numpy as np

from lm.common.errors import UsageError

DESCRIPTION_FILE = "dataset.json"
FORMAT = 1
SHARD_TOKENS = 100_000_000  # a shard ends after the document that reaches this number
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

    def __init__(self, folder: Path, split: str, vocab_size: int, shard_tokens: int = SHARD_TOKENS):
        self.folder = folder
        self.split = split
        self.dtype = token_dtype(vocab_size)
        self.shard_tokens = shard_tokens
        # The description of this split in dataset.json, without hashes; `close` adds them.
        self.part = {"documents": 0, "bytes": 0, "tokens": 0, "shards": []}
        # name → (open file, SHA-256 of its content, the file's entry in `part`)
        self._files: dict[str, tuple] = {}

    def write(self, tokens: np.ndarray, n_bytes: int, answers: np.ndarray | None = None) -> None:
        """Write the tokens of one document, whose text has n_bytes bytes.
        Row i of `answers`, (n, 2), is start and end of answer i, as indices into `tokens`."""
        part, shards = self.part, self.part["shards"]
        if answers is not None:
            empty = {"file": f"{self.split}-answers.bin", "count": 0, "tokens": 0}
            stored = part.setdefault("answers", empty)
            positions = np.pad(answers, ((0, 0), (1, 0))) + part["tokens"]  # (n, 3)
            self._append(stored, positions.astype(ANSWER_DTYPE))
            stored["count"] += len(answers)
            stored["tokens"] += int(np.diff(answers).sum())
        if not shards or shards[-1]["tokens"] >= self.shard_tokens:
            shards.append({"file": f"{self.split}-{len(shards):05d}.bin", "tokens": 0})
        self._append(shards[-1], tokens.astype(self.dtype, copy=False))
        for counted in (part, shards[-1]):
            counted["tokens"] += len(tokens)
        part["documents"] += 1
        part["bytes"] += n_bytes

    def close(self) -> dict:
        """Close the files, and return the description of this split."""
        for file, sha256, entry in self._files.values():
            file.close()
            entry["sha256"] = sha256.hexdigest()
        return self.part

    def _append(self, entry: dict, array: np.ndarray) -> None:
        name = entry["file"]
        if name not in self._files:
            self._files[name] = open(self.folder / name, "wb"), hashlib.sha256(), entry  # noqa: SIM115
        file, sha256, _ = self._files[name]
        file.write(array)
        sha256.update(array)


def write_description(folder: Path, facts: dict) -> dict:
    """Write dataset.json with `facts`, which have "vocab_size" and "splits"; return its content."""
    description = {"format": FORMAT, "dtype": token_dtype(facts["vocab_size"]).str} | facts
    content = json.dumps(description, indent=2, ensure_ascii=False)
    (folder / DESCRIPTION_FILE).write_bytes(content.encode(errors="replace"))
    return description


def is_prepared(folder: str | Path) -> bool:
    """Return True for a folder that scripts.prepare_data has written."""
    return (Path(folder) / DESCRIPTION_FILE).is_file()


def read_description(folder: str | Path) -> dict:
    """Read dataset.json. Raises UsageError if it is missing, damaged or of an unknown format, or if
    a file has another size than it says."""
    folder = Path(folder)
    path = folder / DESCRIPTION_FILE
    if not is_prepared(folder):
        flags = f"--data {folder}" if folder.is_file() else f"--data FILE --out {folder}"
        raise UsageError(
            f"{folder}: no prepared data here, {DESCRIPTION_FILE} is missing; prepare it with "
            f"`python -m scripts.prepare_data {flags}` (conversations: see --help)"
        )
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        description.setdefault("kind", TEXT)
        dtype = token_dtype(description["vocab_size"])
        known = description["format"] == FORMAT and description["kind"] in KINDS
        if not known or description["dtype"] != dtype.str:
            raise ValueError("a format that this version does not know")
        for part in (description["splits"][split] for split in SPLITS):
            sizes = {shard["file"]: shard["tokens"] * dtype.itemsize for shard in part["shards"]}
            if answers := part.get("answers"):
                sizes[answers["file"]] = answers["count"] * 3 * ANSWER_DTYPE.itemsize
            for name, size in sizes.items():
                if (found := (folder / name).stat().st_size) != size:
                    raise ValueError(f"{name} has {found} bytes, not {size}")
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        problem = f"damaged or another version ({type(error).__name__}: {error})"
        raise UsageError(f"{path}: {problem}: prepare the data again") from error
    return description
