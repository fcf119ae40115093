"""What packing and padding make of the same documents: how many positions of a batch train.

A position is useful if its target is a token of a document, its end included. Padding is not, nor
is the begin of the next document, which packing puts after an end and which teaches nothing.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.errors import DataError
from data.shards import read_description
from model.transformer import IGNORE_INDEX

PAD_ID = 0  # which id pads makes no difference: it is masked out of the loss
SEED = 0


def read_shards(folder: Path) -> list[np.memmap]:
    """The token shards of the train split."""
    description = read_description(folder)
    shards = description["splits"]["train"]["shards"]
    return [np.memmap(folder / shard["file"], description["dtype"], mode="r") for shard in shards]


def document_lengths(folder: Path) -> np.ndarray:
    """Tokens of every document of the train split, begin and end included, in order.

    Raises:
        DataError: the begins in the shards are not as many as the documents.
    """
    description = read_description(folder)
    lengths = [np.zeros(0, np.int64)]
    for shard in read_shards(folder):
        begins = np.flatnonzero(shard == description["bos_id"])
        lengths.append(np.diff(begins, append=len(shard)))
    lengths = np.concatenate(lengths)
    if len(lengths) != (expected := description["splits"]["train"]["documents"]):
        raise DataError(f"{folder}: {len(lengths)} documents begin in the shards, not {expected}")
    return lengths


def packed(lengths: np.ndarray, seq_len: int) -> dict:
    """This project's way: documents one after the other, cut into full sequences of seq_len.

    Returns:
        positions: that the model computes in one epoch; useful: those of them that train; lost:
        tokens of documents that are never a target.
    """
    positions = (int(lengths.sum()) - 1) // seq_len * seq_len
    begins = np.cumsum(lengths) - lengths  # where in the stream each document begins
    useful = positions - int(np.count_nonzero((begins >= 1) & (begins <= positions)))
    return _counts(positions, useful, lost=int((lengths - 1).sum()) - useful)


def padded(lengths: np.ndarray, seq_len: int) -> dict:
    """MiniMind's way: each document cut off at seq_len tokens, or filled up to them.

    As in its dataset/lm_dataset.py, seq_len tokens make seq_len - 1 positions with a target.
    Returns as `packed`.
    """
    kept = np.minimum(lengths, seq_len)
    lost = int((lengths - kept).sum())
    return _counts(len(lengths) * (seq_len - 1), int((kept - 1).sum()), lost)


def padded_to_longest(lengths: np.ndarray, seq_len: int, batch_size: int) -> dict:
    """The same in shuffled batches, each filled up to its own longest document only."""
    kept = np.random.default_rng(SEED).permutation(np.minimum(lengths, seq_len))
    first = np.arange(0, len(kept), batch_size)
    rows = np.diff(first, append=len(kept))
    positions = int((rows * (np.maximum.reduceat(kept, first) - 1)).sum())
    return _counts(positions, int((kept - 1).sum()), lost=int((lengths - kept).sum()))


def _counts(positions: int, useful: int, lost: int) -> dict:
    return {"positions": positions, "useful": useful, "lost": lost}


def padded_batches(
    folder: Path, seq_len: int, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, targets), each (batch_size, seq_len - 1): documents of the first shard at
    random, padded as `padded` counts them."""
    shard = read_shards(folder)[0]
    begins = np.flatnonzero(shard == read_description(folder)["bos_id"])
    ends = np.append(begins[1:], len(shard))
    random = np.random.default_rng(SEED)
    while True:
        rows = np.full((batch_size, seq_len), -1, np.int64)
        for row, i in zip(rows, random.integers(len(begins), size=batch_size), strict=True):
            document = shard[begins[i] : ends[i]][:seq_len]
            row[: len(document)] = document
        rows = torch.from_numpy(rows)
        tokens = rows.masked_fill(rows < 0, PAD_ID)[:, :-1]
        targets = rows.masked_fill(rows < 0, IGNORE_INDEX)[:, 1:]
        yield tokens.to(device), targets.to(device)
