"""Prepared data as PyTorch datasets of (tokens, targets) pairs, and their micro-batches."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from common.numbers import counted
from data.errors import DataError, NothingFitsError
from data.order import MicroBatchSampler
from data.shards import ANSWER_DTYPE, CONVERSATIONS, TEXT, read_description
from data.tokenizer import tokenizer_in
from model.transformer import IGNORE_INDEX


class TokenStream(Dataset):
    """The shards of one split as one stream of tokens, memory-mapped from the start, so that the
    folder may go during a run. Raises DataError: no sound data of this kind."""

    kind: str  # of data, one of `shards.KINDS`
    every_target_counts: bool  # none is IGNORE_INDEX
    lengths: np.ndarray | None = None  # of each sample, in targets; None: all have seq_len

    def __init__(self, folder: str | Path, split: str, seq_len: int):
        self.folder = Path(folder)
        self.split = split
        self.seq_len = seq_len
        self.description = read_description(folder)
        if (kind := self.description["kind"]) != self.kind:
            raise DataError(f"{folder} holds {kind}, not {self.kind}")
        self._part = part = self.description["splits"][split]
        self.n_tokens = part["tokens"]
        self.bytes_per_token = part["bytes"] / max(1, part.get("answers", part)["tokens"])
        self.vocab_size = self.description["vocab_size"]
        self.tokenizer_path = tokenizer_in(self.folder)
        # The positions in the stream at which shards begin, and its length.
        self._starts = np.cumsum([0] + [shard["tokens"] for shard in part["shards"]])
        files = [self.folder / shard["file"] for shard in part["shards"]]
        self._shards = [np.memmap(file, self.description["dtype"], mode="r") for file in files]

    def __reduce__(self) -> tuple:
        # Pickled, the maps would carry the data itself along.
        return type(self), (self.folder, self.split, self.seq_len)

    @property
    def identity(self) -> str:
        """A hash of everything that training reads of this split."""
        files = [*self._part["shards"], *filter(None, [self._part.get("answers")])]
        hashes = "".join(file["sha256"] for file in files)
        return hashlib.sha256(hashes.encode()).hexdigest()[:16]

    @property
    def tokens_per_sample(self) -> float:
        """The mean over all samples, without padding."""
        return self.seq_len if self.lengths is None else float(self.lengths.mean())

    def _read(self, start: int, length: int) -> Tensor:
        """Return the tokens from position start on, int64 of shape (length,)."""
        end = start + length
        first = np.searchsorted(self._starts, start, side="right") - 1
        last = np.searchsorted(self._starts, end)
        shards = zip(self._starts[first:last], self._shards[first:last], strict=True)
        tokens = np.concatenate([shard[max(start - at, 0) : end - at] for at, shard in shards])
        if (largest := tokens.max()) >= self.vocab_size:
            raise DataError(
                f"{self.folder}: damaged, prepare the data again: token id {largest} in "
                f"{self.split} is outside the vocabulary of {self.vocab_size}"
            )
        return torch.from_numpy(tokens.astype(np.int64))


class PackedDataset(TokenStream):
    """Text, cut into sequences of seq_len: sample i is tokens[i·seq_len : (i+1)·seq_len] of the
    stream, with the targets one token further. Raises NothingFitsError: there is not one."""

    kind = TEXT
    every_target_counts = True

    def __init__(self, folder: str | Path, split: str, seq_len: int):
        super().__init__(folder, split, seq_len)
        if len(self) < 1:
            raise NothingFitsError(
                f"{folder}: the {split} split has {self.n_tokens} tokens, one sequence needs "
                f"max_seq_len + 1 = {seq_len + 1}: use a shorter --max_seq_len or more text"
            )

    def __len__(self) -> int:
        return max(0, self.n_tokens - 1) // self.seq_len

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets), both int64, (seq_len,). Raises DataError: damage."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        window = self._read(i * self.seq_len, self.seq_len + 1)
        return window[:-1], window[1:]

    def documents_of(self, samples: Sequence[int], bos_id: int) -> np.ndarray:
        """Return the number of the document in which each sample begins, int64, (samples,)."""
        begins = [
            start + np.flatnonzero(shard == bos_id)
            for start, shard in zip(self._starts, self._shards, strict=False)  # one start more
        ]
        positions = np.asarray(samples, np.int64) * self.seq_len
        return np.searchsorted(np.concatenate(begins), positions, side="right") - 1


class ConversationSet(TokenStream):
    """Row i is a conversation from its beginning to the end of its last answer.

    A conversation longer than seq_len targets ends with the last answer that fits. If none does,
    it is left out. Raises NothingFitsError: there is not one row.
    """

    kind = CONVERSATIONS
    every_target_counts = False

    def __init__(self, folder: str | Path, split: str, seq_len: int):
        super().__init__(folder, split, seq_len)
        self._answers = np.empty((0, 3), ANSWER_DTYPE)  # see there
        if "answers" in self._part:  # else the split is empty
            file = self.folder / self._part["answers"]["file"]
            self._answers = np.memmap(file, ANSWER_DTYPE, mode="r").reshape(-1, 3)
        begin, said, end = self._answers.T
        sound = (begin >= 0) & (begin < said) & (said < end) & (end <= self.n_tokens)
        if not sound.all():
            raise DataError(f"{folder}: damaged answers in {split}; prepare the data again")
        # The answers that fit: of row i those from first[i] to before end[i].
        fitting = np.flatnonzero(end - begin <= seq_len + 1)
        begins, rows, n_answers = np.unique(begin[fitting], return_index=True, return_counts=True)
        self._first = fitting[rows]
        self._end = self._first + n_answers
        if not len(self):
            raise NothingFitsError(
                f"{folder}: no conversation of the {split} split has an answer within "
                f"{seq_len} tokens: use a longer --max_seq_len"
            )
        self.lengths = end[self._end - 1] - begins - 1  # of each row, in targets
        self.n_cut = int((np.append(begin, -1)[self._end] == begins).sum())
        self.n_left_out = self._part["documents"] - len(self)

    @property
    def summary(self) -> str:
        """The numbers of rows, cut ones and conversations left out."""
        rows = f"{counted(len(self), CONVERSATIONS)} within {self.seq_len:,} tokens"
        return f"{rows}, {self.n_cut:,} of them cut after an answer; {self.n_left_out:,} left out"

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets), both int64, (lengths[i],), IGNORE_INDEX where a target is no
        part of an answer. Raises DataError: damage."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        answers = self._answers[self._first[i] : self._end[i]]
        begin = answers[0, 0]
        row = self._read(begin, int(self.lengths[i]) + 1)
        targets = torch.full_like(row, IGNORE_INDEX)
        for said, end in (answers[:, 1:] - begin).tolist():
            targets[said:end] = row[said:end]
        return row[:-1], targets[1:]

    def collate(self, rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets), both (rows, longest): padded at their ends, where no target
        counts, to a multiple, so that few shapes differ, and to at most seq_len."""
        multiple = max(8, min(64, self.seq_len // 16))
        longest = max(len(tokens) for tokens, _ in rows)
        length = min(-(-longest // multiple) * multiple, self.seq_len)
        all_tokens = torch.zeros(len(rows), length, dtype=torch.int64)
        all_targets = torch.full((len(rows), length), IGNORE_INDEX)
        for i, (tokens, targets) in enumerate(rows):
            all_tokens[i, : len(tokens)] = tokens
            all_targets[i, : len(targets)] = targets
        return all_tokens, all_targets


def micro_batches(
    dataset: TokenStream, sampler: MicroBatchSampler, num_workers: int, pin_memory: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, targets) without an end, both (batch_size, max_seq_len), or as `collate` of
    the data set makes them. num_workers processes read ahead; 0: none does."""
    # The loader has a generator of its own, because the global one drives dropout.
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),
        collate_fn=getattr(dataset, "collate", None),
    )
    yield from loader
