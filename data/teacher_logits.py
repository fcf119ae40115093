"""What a teacher expects at every target of a training split, written down once for many students
or epochs: its k likeliest pieces, their probabilities, and that of all other pieces together.

A file has one record for each target that counts, in the order of the samples: k ids, the likeliest
first, and logarithms in float16, which rounds one by a 2048th of it at most; bfloat16 would spend
three of these bits on sizes that no logarithm has. Files are parts of equally many samples, and the
JSON file that describes them has its name from the moment on when the last one is there.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from common.atomic import whole_file
from data.dataset import TokenStream
from data.errors import DataError
from data.shards import token_dtype
from model.loss import IGNORE_INDEX

DESCRIPTION_FILE = "teacher_logits.json"
BEGUN_FILE = "teacher_logits.begun.json"  # so it is called before
FORMAT = 1
PART_BYTES = 1 << 28
ROUNDING = 0.02  # of the sum of all probabilities: a 2048th of their entropy, some 11 nats at most
FLAGS = {"max_seq_len", "temperature", "k"}  # of a description, as they are typed
AGAIN = "the command that recorded the teacher there mends it"


class TopK(NamedTuple):
    """A teacher's probabilities at some temperature, as far as they are kept: those of its k
    likeliest pieces, the likeliest first, and where there are others, theirs together."""

    ids: Tensor  # (B, T, k) int64
    log_probabilities: Tensor  # (B, T, k + 1), the others' last; (B, T, k) where there are none


def record_dtype(vocab_size: int, k: int) -> np.dtype:
    """Of one target: k ids, and k + 1 logarithms, or k where that is the whole vocabulary."""
    ids = ("ids", token_dtype(vocab_size), (k,))
    return np.dtype([ids, ("log_probabilities", "<f2", (k + (k < vocab_size),))])


def facts_of(samples: TokenStream) -> dict:
    """Which samples a recording is of."""
    return {
        "data": samples.identity,
        "tokenizer": samples.description["tokenizer_sha256"][:16],
        "max_seq_len": samples.seq_len,
    }


def differences(saved: dict, asked: dict) -> str:
    """Where a recording is not what is asked for, for people; empty if nowhere."""
    return "; ".join(
        f"{'--' if name in FLAGS else ''}{name} {saved.get(name)} there, {value} here"
        for name, value in asked.items()
        if saved.get(name) != value
    )


def parts_of(samples: TokenStream, samples_per_part: int) -> list[tuple[range, int]]:
    """The samples of each part, and how many records that takes."""
    n, before = len(samples), samples.targets_before
    begins = range(0, n, samples_per_part)
    parts = [range(begin, min(begin + samples_per_part, n)) for begin in begins]
    return [(part, before(part.stop) - before(part.start)) for part in parts]


def write_part(path: Path, records: Iterable[np.ndarray]) -> str:
    """A file that is whole or not there; returns its SHA-256."""
    sha256 = hashlib.sha256()
    with whole_file(path) as partial, open(partial, "wb") as file:
        for some in records:
            file.write(some.tobytes())
            sha256.update(some.tobytes())
    return sha256.hexdigest()


def read_recording(folder: Path) -> dict:
    """What DESCRIPTION_FILE says, or BEGUN_FILE; empty where neither is there. Raises DataError: it
    cannot be read, or is no such description."""
    for path in (folder / DESCRIPTION_FILE, folder / BEGUN_FILE):
        if not path.exists():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                message = f"format {found['format']!r}, this version reads format {FORMAT}"
                raise DataError(f"{path}: {message}")
            numbers = [found[name] for name in ("samples_per_part", "k", "vocab_size")]
            if any(type(number) is not int or number < 1 for number in numbers):
                raise TypeError(f"{numbers} are no counts")
            for part in found["parts"]:
                bytes.fromhex(part["sha256"])
            _ = Path(found["folder"]), found["teacher"][:1], float(found["temperature"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            message = f"{type(error).__name__}: {error}"
            raise DataError(f"{path}: not a description of a teacher ({message})") from error
        return found
    return {}


def finished_recording(folder: Path) -> dict:
    """Its description. Raises DataError: there is none."""
    found = read_recording(folder)
    if (folder / DESCRIPTION_FILE).exists():
        return found
    what = "an unfinished recording" if found else "no recording of a teacher"
    out = folder if found or not folder.exists() else "NEW_FOLDER"
    flags = {"data": found.get("folder", "FOLDER"), "out": out}
    flags |= {name: found[name] for name in sorted(FLAGS & found.keys())}
    typed = " ".join(f"--{name} {value}" for name, value in flags.items())
    raise DataError(
        f"{folder}: {what} ({DESCRIPTION_FILE} is missing): python -m scripts.teacher_logits "
        f"TEACHER {typed} makes it"
    )


def identity_of(description: dict) -> str:
    """A hash of all that is recorded."""
    return hashlib.sha256(
        "".join(part["sha256"] for part in description["parts"]).encode()
    ).hexdigest()


class RecordedSet(Dataset):
    """Samples with what a teacher expects at their targets.

    Args:
        samples: those that were recorded.
        folder: written by scripts.teacher_logits.
        asked: what it must have been recorded with, besides: "temperature", "vocab_size".

    Raises DataError: it was not, or is not all there.
    """

    def __init__(self, samples: TokenStream, folder: str | Path, asked: dict):
        self.samples = samples
        self.folder = folder = Path(folder)
        self.description = finished_recording(folder)
        if other := differences(self.description, facts_of(samples) | asked):
            of = self.description["folder"]
            raise DataError(f"{folder}, a recording of {of}, is for something else: {other}")
        self.k = self.description["k"]
        self._dtype = record_dtype(self.description["vocab_size"], self.k)
        self._parts = parts_of(samples, self.description["samples_per_part"])
        if (listed := len(self.description["parts"])) != len(self._parts):
            wanted = f"{listed} parts instead of {len(self._parts)}"
            raise DataError(f"{folder / DESCRIPTION_FILE}: {wanted}: {AGAIN}")
        for number, (_, count) in enumerate(self._parts):
            self._require(self._path(number), count * self._dtype.itemsize)
        self._maps: list[np.memmap] | None = None
        self._files()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> tuple[tuple[Tensor, Tensor], np.ndarray]:
        """The sample, and the records of those of its targets that count. Raises DataError: see
        `TokenStream`; the records are no probabilities of pieces."""
        number = i // self.description["samples_per_part"]
        part, before = self._parts[number][0], self.samples.targets_before
        begin, end = (before(sample) - before(part.start) for sample in (i, i + 1))
        records = np.array(self._files()[number][begin:end])
        sums = torch.from_numpy(records["log_probabilities"].astype(np.float32)).logsumexp(-1)
        of_pieces = records["ids"].max(initial=0) < self.description["vocab_size"]
        if not (of_pieces and (sums.abs() < ROUNDING).all()):  # false of what is no number, too
            raise DataError(f"{self._path(number)} is damaged: {AGAIN}")
        return self.samples[i], records

    def collate(self, rows: list) -> tuple[Tensor, Tensor, TopK]:
        """(tokens, targets) as the samples' own, and what the teacher expects at each target that
        counts; nothing at the others."""
        samples, records = zip(*rows, strict=True)
        tokens, targets = getattr(self.samples, "collate", default_collate)(list(samples))
        counts, records = targets != IGNORE_INDEX, np.concatenate(records)

        def in_place(values: Tensor) -> Tensor:
            everywhere = torch.zeros(*targets.shape, values.shape[1], dtype=values.dtype)
            everywhere[counts] = values
            return everywhere

        ids = torch.from_numpy(records["ids"].astype(np.int64))
        logarithms = torch.from_numpy(records["log_probabilities"].astype(np.float16))
        return tokens, targets, TopK(in_place(ids), in_place(logarithms))

    def _path(self, number: int) -> Path:
        return self.folder / part_name(number)

    def _require(self, path: Path, n_bytes: int) -> None:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} is missing: {AGAIN}") from error
        if size != n_bytes:
            raise DataError(f"{path}: {size} bytes long instead of {n_bytes}: {AGAIN}")

    def _files(self) -> list[np.memmap]:
        if self._maps is None:
            paths = map(self._path, range(len(self._parts)))
            self._maps = [np.memmap(path, self._dtype, mode="r") for path in paths]
        return self._maps

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_maps": None}  # a pickled memmap would carry the data itself along


def part_name(number: int) -> str:
    return f"train-{number:05d}.bin"
