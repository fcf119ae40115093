"""Prepared conversations as a PyTorch dataset of (tokens, targets) pairs, one for each."""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.numbers import counted
from data.dataset import TokenStream
from data.errors import DataError, NothingFitsError
from data.shards import ANSWER_DTYPE, CONVERSATIONS
from model.transformer import IGNORE_INDEX


class ConversationSet(TokenStream):
    """Row i is a conversation from its beginning to the end of its last answer.

    A conversation longer than seq_len targets ends with the last answer that fits. Where not even
    the first answer fits, it is left out. `summary` says how often.

    Raises DataError: see `TokenStream`. NothingFitsError: there is not one row.
    """

    kind = CONVERSATIONS
    every_target_counts = False

    def __init__(self, folder: str | Path, split: str, seq_len: int):
        super().__init__(folder, split, seq_len)
        begin, said, end = self._answers.T
        sound = (begin >= 0) & (begin < said) & (said < end) & (end <= self.n_tokens)
        if not sound.all():
            raise DataError(f"{folder}: damaged answers in {split}; prepare the data again")
        # Conversations of which an answer ends within seq_len targets: the answers of row i are
        # those from first[i] to before end[i].
        fitting = np.flatnonzero(end - begin <= seq_len + 1)
        _, rows, n_answers = np.unique(begin[fitting], return_index=True, return_counts=True)
        self._first = fitting[rows]
        self._end = self._first + n_answers
        if not len(self):
            raise NothingFitsError(
                f"{folder}: no conversation of the {split} split has an answer within {seq_len} "
                "tokens: use a longer --max_seq_len"
            )
        begins = begin[self._first]
        self.lengths = end[self._end - 1] - begins - 1  # of each row, in targets
        self.n_cut = int((np.append(begin, -1)[self._end] == begins).sum())
        self.n_left_out = 1 + np.count_nonzero(np.diff(begin)) - len(self)
        part = self.description["splits"][split]
        self.bytes_per_token = part["bytes"] / part["answers"]["tokens"]

    @cached_property
    def _answers(self) -> np.ndarray:
        """Places of the answers, memory-mapped, (answers, 3), see `shards.ANSWER_DTYPE`."""
        listed = self.description["splits"][self.split].get("answers")
        if listed is None:  # an empty split
            return np.empty((0, 3), ANSWER_DTYPE)
        return np.memmap(self.folder / listed["file"], ANSWER_DTYPE, mode="r").reshape(-1, 3)

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
        answers = self._answers[self._first[i] : self._end[i]]
        begin = answers[0, 0]
        row = self._read(begin, int(self.lengths[i]) + 1)
        targets = torch.full_like(row, IGNORE_INDEX)
        for said, end in (answers[:, 1:] - begin).tolist():
            targets[said:end] = row[said:end]
        return row[:-1], targets[1:]

    def collate(self, rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets), both (rows, longest rounded up): padded at their ends, where no
        target counts, to a multiple, so that few shapes differ, and to at most seq_len."""
        multiple = max(8, min(64, self.seq_len // 16))
        longest = max(len(tokens) for tokens, _ in rows)
        length = min(-(-longest // multiple) * multiple, self.seq_len)
        all_tokens = torch.zeros(len(rows), length, dtype=torch.int64)
        all_targets = torch.full((len(rows), length), IGNORE_INDEX)
        for i, (tokens, targets) in enumerate(rows):
            all_tokens[i, : len(tokens)] = tokens
            all_targets[i, : len(targets)] = targets
        return all_tokens, all_targets
