"""PyTorch datasets of prepared data."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lm.common.errors import UsageError
from lm.data.shards import TEXT, read_description
from lm.data.tokenizer import tokenizer_in
from model import IGNORE_INDEX


class NothingFitsError(UsageError):
    """A split has no sample for the requested length."""


class TokenStream(Dataset):
    """The shards of one split as one stream of tokens.
    All shards are memory-mapped from the start, so the folder may be deleted during a run. Raises
    UsageError if the folder is damaged or holds another kind of data."""

    kind: str  # one of `shards.KINDS`
    lengths: np.ndarray | None = None  # number of targets of each conversation; None: a text
    n_first: int = 0  # samples 0 to n_first - 1 are the first segmentation; 0: all are alike
    segmentations: int = 1  # ways in which the samples hold the same text

    def __init__(self, folder: str | Path, split: str, seq_len: int):
        self.folder = Path(folder)
        self.split = split
        self.seq_len = seq_len
        self.description = read_description(folder)
        if (kind := self.description["kind"]) != self.kind:
            raise UsageError(f"{folder} holds {kind}, not {self.kind}")
        self._part = part = self.description["splits"][split]
        self.n_tokens = part["tokens"]
        self.bytes_per_token = part["bytes"] / max(1, part.get("answers", part)["tokens"])
        self.vocab_size = self.description["vocab_size"]
        self.tokenizer_path = tokenizer_in(self.folder)
        # Position of the first token of each shard; the last entry is the length of the stream.
        self._starts = np.cumsum([0] + [shard["tokens"] for shard in part["shards"]])
        files = [self.folder / shard["file"] for shard in part["shards"]]
        self._shards = [np.memmap(file, self.description["dtype"], mode="r") for file in files]

    def __reduce__(self) -> tuple:
        # A pickled memory map would contain the data. A copy therefore opens the files again.
        return type(self), (self.folder, self.split, self.seq_len)

    @property
    def identity(self) -> str:
        """A hash of all files of this split."""
        answers = [self._part["answers"]] if "answers" in self._part else []
        files = self._part["shards"] + answers
        hashes = "".join(file["sha256"] for file in files)
        return hashlib.sha256(hashes.encode()).hexdigest()[:16]

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one pass over the text, whatever the number of segmentations."""
        return math.ceil(len(self) / self.segmentations)

    @property
    def tokens_per_sample(self) -> float:
        """Mean number of tokens in a sample, without what fills a row."""
        return self.seq_len if self.lengths is None else float(self.lengths.sum()) / len(self)

    def read(self, start: int, length: int) -> Tensor:
        """Return `length` tokens from position `start` of the stream, int64 (length,)."""
        end = start + length
        first = np.searchsorted(self._starts, start, side="right") - 1
        last = np.searchsorted(self._starts, end)
        shards = zip(self._starts[first:last], self._shards[first:last], strict=True)
        parts = [shard[max(start - begin, 0) : end - begin] for begin, shard in shards]
        tokens = np.concatenate(parts)
        if (largest := tokens.max()) >= self.vocab_size:
            limit = f"token id {largest} is outside the vocabulary of {self.vocab_size}"
            raise UsageError(f"{self.folder}: damaged, prepare the data again: {limit}")
        return torch.from_numpy(tokens.astype(np.int64))


class PackedDataset(TokenStream):
    """Text, cut into sequences of seq_len tokens.
    Sample i has tokens[i·seq_len : (i+1)·seq_len] of the stream; its targets begin one token later.
    Raises NothingFitsError if the text is shorter than one sample."""

    kind = TEXT

    def __init__(self, folder: str | Path, split: str, seq_len: int):
        super().__init__(folder, split, seq_len)
        if len(self) < 1:
            reason = f"the {split} split has {self.n_tokens} tokens, a sequence needs {seq_len + 1}"
            raise NothingFitsError(f"{folder}: {reason}: use other text or a shorter --max_seq_len")
        made_from = self.description.get("prepared_from", {})
        self.segmentations = made_from.get("segmentations") or 1
        first = self._part.get("first_tokens", 0)  # older data mixes the segmentations
        self.n_first = first // seq_len if first < self.n_tokens else 0

    def __len__(self) -> int:
        return max(0, self.n_tokens - 1) // self.seq_len

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets), both int64 (seq_len,). Raises UsageError for damaged data."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        window = self.read(i * self.seq_len, self.seq_len + 1)
        return window[:-1], window[1:]

    def documents_of(self, samples: Sequence[int], bos_id: int) -> np.ndarray:
        """Return the index of the document in which each sample begins, int64 (samples,)."""
        shards = zip(self._starts[:-1], self._shards, strict=True)
        begins = [start + np.flatnonzero(shard == bos_id) for start, shard in shards]
        positions = np.asarray(samples, np.int64) * self.seq_len
        return np.searchsorted(np.concatenate(begins), positions, side="right") - 1


class WithNoise(Dataset):
    """The samples of a text in several segmentations, with a `share` of the input tokens replaced
    by tokens from elsewhere in the text. This makes it harder to memorise the text (Xie et al.,
    https://arxiv.org/abs/1703.02573). The targets and the first segmentation stay as they are.
    A sample has the same noise each time that it is read; `seed` and its index decide it."""

    def __init__(self, text: PackedDataset, share: float, seed: int):
        self.text, self.share, self.seed = text, share, seed

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets), both int64 (seq_len,). Raises UsageError for damaged data."""
        tokens, targets = self.text[i]
        if i < self.text.n_first:
            return tokens, targets
        random = np.random.default_rng((self.seed, i))
        others = self.text.read(random.integers(self.text.n_tokens - len(tokens)), len(tokens))
        replaced = torch.from_numpy(random.random(len(tokens)) < self.share)
        return torch.where(replaced, others, tokens), targets


def next_tokens(row: Tensor, spans: Iterable[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets) of a row, int64 (T,), both (T - 1,). A target is the next token if
    that token is in a span (first position, end), otherwise IGNORE_INDEX."""
    targets = torch.full_like(row, IGNORE_INDEX)
    for start, end in spans:
        targets[start:end] = row[start:end]
    return row[:-1], targets[1:]


def pad(rows: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Pad rows of (tokens, targets) at their ends to the longest row; both become (rows, length).
    Padded targets are IGNORE_INDEX. Causal attention ignores padding at the end."""
    tokens, targets = zip(*rows, strict=True)
    return pad_sequence(tokens, True), pad_sequence(targets, True, IGNORE_INDEX)
