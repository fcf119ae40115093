"""Prepared conversations as a PyTorch dataset of (tokens, targets) pairs, one for each."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.numbers import counted
from data.dataset import TokenStream
from data.errors import DataError
from data.order import MicroBatchSampler
from data.shards import ANSWER_DTYPE, CONVERSATIONS, read_description
from data.tokenizer import open_tokenizer
from model.transformer import IGNORE_INDEX

MEASURED_ROWS = 1 << 18  # for the share of padding
READ_ROWS = 1024  # for the bytes of a token; as many as --eval_samples


class ConversationSet(TokenStream):
    """Row i is a conversation from its beginning to the end of its last answer.

    A conversation longer than seq_len targets ends with the last answer that fits. Where not even
    the first answer fits, it is left out. `summary` says how often.

    Raises DataError: see `TokenStream`, or there is not one row.
    """

    kind = CONVERSATIONS
    every_target_counts = False

    def __init__(self, folder: str | Path, split: str, seq_len: int):
        super().__init__(folder, split, seq_len)
        self._answers: np.ndarray | None = read_answers(self.folder, self.description, split)
        answers = self._answers
        begin, said, end = answers.T
        in_order = (begin >= 0) & (begin < said) & (said < end) & (end <= self.n_tokens)
        after_the_last = (end[:-1] <= said[1:]) & (begin[:-1] <= begin[1:])
        if not (in_order.all() and after_the_last.all()):
            raise DataError(
                f"{folder}: answers in the {split} split lie outside their conversations: the "
                "files are damaged; prepare the data again"
            )
        # The answers of row i are those from first[i] to before end[i].
        self._first, self._end = rows_within(answers, seq_len)
        if not len(self):
            raise DataError(
                f"{folder}: no conversation of the {split} split has an answer within {seq_len} "
                "tokens: use a longer --max_seq_len"
            )
        begins = begin[self._first]
        self.lengths = end[self._end - 1] - begins - 1  # of each row, in targets
        self.n_cut = int((np.append(begin, -1)[self._end] == begins).sum())
        self.n_left_out = 1 + np.count_nonzero(np.diff(begin)) - len(self)
        part = self.description["splits"][split]
        self.bytes_per_token = part["bytes"] / part["answers"]["tokens"]
        if self.n_cut + self.n_left_out and self.tokenizer_path.is_file():
            self.bytes_per_token = self._bytes_per_token()

    def _bytes_per_token(self) -> float:
        """Return the mean over the answers of READ_ROWS, spread evenly: the bytes of the answers
        that were cut off are not known."""
        tokenizer, n_bytes, n_tokens = open_tokenizer(self.tokenizer_path), 0, 0
        for i in np.unique(np.linspace(0, len(self) - 1, READ_ROWS).astype(int)).tolist():
            _, targets = self[i]
            said = targets[targets != IGNORE_INDEX].tolist()
            n_bytes += len(tokenizer.decode(said).encode())
            n_tokens += len(said)
        return n_bytes / n_tokens

    @staticmethod
    def fits(folder: str | Path, split: str, seq_len: int) -> bool:
        """Return whether the split holds at least one row."""
        answers = read_answers(Path(folder), read_description(folder), split)
        return len(rows_within(answers, seq_len)[0]) > 0

    @property
    def summary(self) -> str:
        """The numbers of rows and of conversations that were cut or left out, for people."""
        rows = counted(len(self), CONVERSATIONS)
        if not self.n_cut + self.n_left_out:
            return f"{rows}, all within {self.seq_len:,} tokens"
        return (
            f"{rows}, {self.n_cut:,} of them cut after the last answer within {self.seq_len:,} "
            f"tokens; {self.n_left_out:,} left out, whose first answer ends beyond"
        )

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets), both int64 of shape (lengths[i],), IGNORE_INDEX where a target
        does not belong to an answer. Raises DataError: a token is outside the vocabulary."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        if self._answers is None:
            self._answers = read_answers(self.folder, self.description, self.split)
        answers = self._answers[self._first[i] : self._end[i]]
        begin = answers[0, 0]
        row = self._read(begin, int(self.lengths[i]) + 1)
        targets = torch.full_like(row, IGNORE_INDEX)
        for said, end in (answers[:, 1:] - begin).tolist():
            targets[said:end] = row[said:end]
        return row[:-1], targets[1:]

    def collate(self, rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets), both (rows, longest rounded up, see `padded`): padded at their
        ends, where no target counts."""
        shape = len(rows), int(padded(max(len(tokens) for tokens, _ in rows), self.seq_len))
        all_tokens = torch.zeros(shape, dtype=torch.int64)
        all_targets = torch.full(shape, IGNORE_INDEX)
        for i, (tokens, targets) in enumerate(rows):
            all_tokens[i, : len(tokens)] = tokens
            all_targets[i, : len(targets)] = targets
        return all_tokens, all_targets

    def share_of_padding(self, sampler: MicroBatchSampler) -> float:
        """Return the share of padding in micro-batches of this order, all processes, in [0, 1)."""
        size = sampler.batch_size
        batches = max(1, min(len(self), MEASURED_ROWS) // size)
        rows = sampler.indices(np.arange(batches * size)).reshape(batches, size)
        lengths = self.lengths[rows]
        positions = padded(lengths.max(axis=1), self.seq_len).sum() * size
        return 1 - float(lengths.sum() / positions)

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"_answers": None}


def read_answers(folder: Path, description: dict, split: str) -> np.ndarray:
    """Return where the answers of a split are, memory-mapped, (answers, 3), see
    `shards.ANSWER_DTYPE`."""
    listed = description["splits"][split].get("answers")
    if listed is None:  # an empty split
        return np.empty((0, 3), ANSWER_DTYPE)
    return np.memmap(folder / listed["file"], ANSWER_DTYPE, mode="r").reshape(-1, 3)


def rows_within(answers: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the conversations of which at least one answer ends within seq_len targets.

    Returns the number of each one's first answer, and of the answer behind the last that fits;
    int64, (rows,) each.
    """
    begins, ends = answers[:, 0], answers[:, 2]
    fitting = np.flatnonzero(ends - begins <= seq_len + 1)  # the first answers of conversations
    _, first, n_answers = np.unique(begins[fitting], return_index=True, return_counts=True)
    return fitting[first], fitting[first] + n_answers


def padded(longest: int | np.ndarray, seq_len: int) -> np.ndarray:
    """Return the length to which rows are padded, given the tokens of the longest: a multiple, so
    that few shapes differ, and at most seq_len."""
    multiple = max(8, min(64, seq_len // 16))
    return np.minimum(-(-longest // multiple) * multiple, seq_len)
