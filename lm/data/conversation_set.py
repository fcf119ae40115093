"""PyTorch datasets of prepared conversations: one by one, or packed into rows for training."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lm.common.errors import UsageError
from lm.common.numbers import counted
from lm.data.dataset import NothingFitsError, TokenStream, next_tokens
from lm.data.order import shuffled
from lm.data.shards import ANSWER_DTYPE, CONVERSATIONS
from model import IGNORE_INDEX


class ConversationSet(TokenStream):
    """Conversations, each from its start to the end of its last answer.
    A conversation with more than seq_len targets is cut after the last answer that fits, or left
    out if no answer fits. Raises NothingFitsError if no conversation is left."""

    kind = CONVERSATIONS

    def __init__(self, folder: str | Path, split: str, seq_len: int):
        super().__init__(folder, split, seq_len)
        self._answers = np.empty((0, 3), ANSWER_DTYPE)  # columns: see `shards.ANSWER_DTYPE`
        if "answers" in self._part:  # an empty split has no such file
            file = self.folder / self._part["answers"]["file"]
            self._answers = np.memmap(file, ANSWER_DTYPE, mode="r").reshape(-1, 3)
        begin, answer, end = self._answers.T
        valid = (begin >= 0) & (begin < answer) & (answer < end) & (end <= self.n_tokens)
        if not valid.all():
            raise UsageError(f"{folder}: damaged answers in {split}; prepare the data again")
        # Conversation i has the answers _first[i] : _end[i], which fit into seq_len targets.
        fitting = np.flatnonzero(end - begin <= seq_len + 1)
        begins, firsts, n_answers = np.unique(begin[fitting], return_index=True, return_counts=True)
        self._first = fitting[firsts]
        self._end = self._first + n_answers
        if not len(begins):
            reason = f"no answer of the {split} split ends within {seq_len} tokens"
            raise NothingFitsError(f"{folder}: {reason}: use a longer --max_seq_len")
        self.lengths = end[self._end - 1] - begins - 1
        # A conversation is cut if the next answer belongs to it too.
        self.n_cut = int((np.append(begin, -1)[self._end] == begins).sum())
        self.n_left_out = self._part["documents"] - len(begins)

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets) of conversation i, both int64 (lengths[i],).
        Targets outside of answers are IGNORE_INDEX. Raises UsageError if the data are damaged."""
        answers = self._answers[self._first[i] : self._end[i]]
        begin = answers[0, 0]
        row = self.read(begin, int(self.lengths[i]) + 1)
        return next_tokens(row, (answers[:, 1:] - begin).tolist())


class ConversationRows(ConversationSet):
    """The same conversations, packed into rows of seq_len targets for training (see `pack`).
    A row holds its conversations one after the other, each of which sees only itself. What is left
    at the end of a row is filled with targets that do not count."""

    def __init__(self, folder: str | Path, split: str, seq_len: int):
        super().__init__(folder, split, seq_len)
        self._packed, self._bounds = pack(self.lengths, seq_len)

    @property
    def summary(self) -> str:
        """How many conversations are used, cut and left out, and the rows that hold them."""
        used = f"{counted(len(self.lengths), CONVERSATIONS)} within {self.seq_len:,} tokens"
        cut = f"{self.n_cut:,} of them cut after an answer; {self.n_left_out:,} left out"
        full = self.tokens_per_sample / self.seq_len
        return f"{used}, {cut}; packed into {counted(len(self), 'rows')}, {full:.1%} full"

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (tokens, targets, starts), each int64 (seq_len,). Targets outside of answers are
        IGNORE_INDEX. `starts` has the first position of each position's conversation. Raises
        UsageError if the data are damaged."""
        tokens = torch.zeros(self.seq_len, dtype=torch.int64)
        targets, starts = torch.full_like(tokens, IGNORE_INDEX), torch.zeros_like(tokens)
        at = 0
        for number in self._packed[self._bounds[i] : self._bounds[i + 1]]:
            place = slice(at, at + int(self.lengths[number]))
            tokens[place], targets[place] = super().__getitem__(number)
            starts[at:] = at
            at = place.stop
        starts[at:] = at
        return tokens, targets, starts


def pack(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Put conversations of these lengths (1 to `size`) into rows that have room for `size`.
    Return (packed, starts): row i holds the conversations packed[starts[i] : starts[i + 1]].

    The rows depend on `lengths` and `size` alone. They are ordered by their first conversations.
    Only the numbers of conversations of each length are searched, as in histogram packing (Krell
    et al., https://arxiv.org/abs/2107.02027). A row begins with the longest conversation that is
    left. Then it takes, of the lengths that leave room for exactly one more, the commonest. All
    rows with the same lengths are packed at once."""
    n = len(lengths)
    mixed = shuffled(np.arange(n), n, seed=0, epoch=0)  # neighbours may be about the same thing
    by_length = mixed[np.argsort(lengths[mixed], kind="stable")]
    count = np.bincount(lengths, minlength=size + 1)  # conversations of each length that are left
    ends = np.cumsum(count)  # by_length[ends[x] - count[x] : ends[x]] are left and have length x
    row_of, n_rows = np.empty(n, np.int64), 0
    while count.any():
        chosen = lengths_of_row(count, size)
        copies = min(int(count[x]) // chosen.count(x) for x in chosen)
        for x in chosen:
            begin = ends[x] - count[x]
            row_of[by_length[begin : begin + copies]] = n_rows + np.arange(copies)
            count[x] -= copies
        n_rows += copies
    _, first = np.unique(row_of, return_index=True)  # the first conversation of each row
    row_of = np.argsort(np.argsort(first))[row_of]
    return np.argsort(row_of, kind="stable"), np.append(0, np.cumsum(np.bincount(row_of)))


def lengths_of_row(count: np.ndarray, size: int) -> list[int]:
    """Return the lengths of the conversations of a row; count[x] conversations have length x."""
    left, chosen, room = count.copy(), [], size
    while (fitting := left[: room + 1]).any():
        pairs = np.minimum(fitting, fitting[::-1])  # x and room - x together fill the row
        length = int(np.flatnonzero(fitting)[-1])
        if chosen and length < room and pairs.any():
            length = int(pairs.argmax())
        chosen.append(length)
        left[length] -= 1
        room -= length
    return chosen
