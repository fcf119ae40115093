"""Token shards as a PyTorch dataset of (tokens, targets) pairs."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.errors import DataError
from data.shards import CONVERSATIONS, TEXT, kind_of, read_description
from data.tokenizer import tokenizer_in

TRAINED_BY = {
    TEXT: "train_pretrain_accelerate.py",
    CONVERSATIONS: "train_sft_accelerate.py (STAGE=sft bash run_accelerate.sh)",
}
SCAN_BYTES = 1 << 30  # a split up to this size is checked whole at start, in well under a second


class TokenStream(Dataset):
    """The shards of one split as one stream of tokens, which does not care where one shard ends and
    the next begins.

    Shards are memory-mapped: what is read can be dropped again by the system, so memory does not
    grow with the corpus. They are so from the start: a folder that is moved or deleted during a run
    takes nothing from it.

    Raises DataError: the folder is not sound prepared data (see `read_description`), or of another
    kind.
    """

    kind: str  # of data, one of `shards.KINDS`
    every_target_counts: bool  # none is IGNORE_INDEX
    lengths: np.ndarray | None = None  # of each sample, in targets; None: all have seq_len

    def __init__(self, folder: str | Path, split: str, seq_len: int):
        self.folder = Path(folder)
        self.split = split
        self.seq_len = seq_len
        self.description = read_description(folder)
        if (kind := kind_of(self.description)) != self.kind:
            raise DataError(f"{folder} holds {kind}, prepared for {TRAINED_BY[kind]}")
        part = self.description["splits"][split]
        self.n_tokens = part["tokens"]
        self.bytes_per_token = part["bytes"] / max(1, part["tokens"])
        self.vocab_size = self.description["vocab_size"]
        self.tokenizer_path = tokenizer_in(self.folder)
        # starts[i] is the position in the stream at which shard i begins, starts[-1] the length of
        # the stream
        self._starts = np.cumsum([0] + [shard["tokens"] for shard in part["shards"]])
        self._maps: list[np.memmap] | None = None
        self._shards()

    def prepare_with(self, tokenizer: Path) -> str:
        """What to do for the same in pieces of another tokenizer."""
        source = "--data TEXT" if self.kind == TEXT else "--conversations FILE"
        return (
            f"prepare the {self.kind} with that one's, in a folder of its own, and train on it: "
            f"`python -m scripts.prepare_data --tokenizer {tokenizer} {source} --out FOLDER`"
        )

    @property
    def identity(self) -> str:
        """A hash of all that training reads of this split."""
        part = self.description["splits"][self.split]
        files = [*part["shards"], *([part["answers"]] if "answers" in part else [])]
        return hashlib.sha256("".join(file["sha256"] for file in files).encode()).hexdigest()[:16]

    @property
    def tokens_per_sample(self) -> float:
        """On average, padding left out."""
        return self.seq_len if self.lengths is None else float(self.lengths.mean())

    def scan(self) -> None:
        """Look for ids outside the vocabulary in the whole split, unless it is larger than
        SCAN_BYTES. Raises DataError: there is one."""
        if self.n_tokens * self._shards()[0].itemsize <= SCAN_BYTES:
            for shard in self._shards():
                self._check(shard)

    def _check(self, tokens: np.ndarray) -> None:
        if (largest := tokens.max()) >= self.vocab_size:
            raise DataError(
                f"{self.folder}: token id {largest} in the {self.split} split is outside the "
                f"vocabulary of {self.vocab_size}: the shards are damaged or of another tokenizer; "
                "prepare the data again"
            )

    def _read(self, start: int, length: int) -> Tensor:
        """So many tokens, int64. Raises DataError: one is outside the vocabulary."""
        pieces = []
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while length:
            offset = start - self._starts[shard]
            piece = self._shards()[shard][offset : offset + length]
            pieces.append(piece)
            start = start + len(piece)
            length = length - len(piece)
            shard = shard + 1
        tokens = np.concatenate(pieces)
        self._check(tokens)
        return torch.from_numpy(tokens.astype(np.int64))

    def _shards(self) -> list[np.memmap]:
        if self._maps is None:
            shards = self.description["splits"][self.split]["shards"]
            self._maps = [
                np.memmap(self.folder / shard["file"], self.description["dtype"], mode="r")
                for shard in shards
            ]
        return self._maps

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_maps": None}  # a pickled memmap would carry the data itself along


class PackedDataset(TokenStream):
    """Text, cut into sequences of seq_len: sample i is tokens[i·seq_len : (i+1)·seq_len] of the
    stream, with the targets one token further.

    Raises DataError: see `TokenStream`, or the split is shorter than one sequence.
    """

    kind = TEXT
    every_target_counts = True

    def __init__(self, folder: str | Path, split: str, seq_len: int):
        super().__init__(folder, split, seq_len)
        if len(self) < 1:
            raise DataError(
                f"{folder}: the {split} split has {self.n_tokens} tokens, one sequence needs "
                f"max_seq_len + 1 = {seq_len + 1}: use a shorter --max_seq_len, more text, or "
                "another --val_fraction when preparing"
            )

    @staticmethod
    def fits(folder: str | Path, split: str, seq_len: int) -> bool:
        """Whether the split holds at least one sequence."""
        return read_description(folder)["splits"][split]["tokens"] > seq_len

    def __len__(self) -> int:
        return max(0, self.n_tokens - 1) // self.seq_len

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """(tokens, targets), both int64 of shape (seq_len,). Raises DataError: a token is outside
        the vocabulary."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        window = self._read(i * self.seq_len, self.seq_len + 1)
        return window[:-1], window[1:]

    def targets_before(self, i: int) -> int:
        """How many targets that count the samples before i have, all of them for i = len."""
        return i * self.seq_len

    def documents_of(self, samples: Sequence[int], bos_id: int) -> np.ndarray:
        """The number of the document in which each sample begins, int64 of shape (samples,)."""
        begins = [
            start + np.flatnonzero(shard == bos_id)
            for start, shard in zip(self._starts, self._shards(), strict=False)  # one start more
        ]
        positions = np.asarray(samples, np.int64) * self.seq_len
        return np.searchsorted(np.concatenate(begins), positions, side="right") - 1
