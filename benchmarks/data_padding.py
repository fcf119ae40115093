"""What packing and padding make of the same documents: how many positions of a batch train.

A position is useful if its target is a token of a document, its end included. Padding is not, nor
is the begin of the next document, which packing puts after an end and which teaches nothing.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.markdown import table
from data.errors import DataError
from data.shards import read_description

SEED = 0


@dataclass
class Positions:
    """Of one epoch."""

    computed: int  # by the model
    useful: int  # those of them that train
    lost: int  # tokens of documents that are never a target


def document_lengths(folder: Path) -> np.ndarray:
    """Tokens of every document of the train split, begin and end included, in order.

    Raises:
        DataError: the begins in the shards are not as many as the documents.
    """
    description = read_description(folder)
    train = description["splits"]["train"]
    lengths = [np.zeros(0, np.int64)]
    for shard in train["shards"]:
        tokens = np.memmap(folder / shard["file"], description["dtype"], mode="r")
        begins = np.flatnonzero(tokens == description["bos_id"])
        lengths.append(np.diff(begins, append=len(tokens)))
    lengths = np.concatenate(lengths)
    if len(lengths) != (expected := train["documents"]):
        raise DataError(f"{folder}: {len(lengths)} documents begin in the shards, not {expected}")
    return lengths


def packed(lengths: np.ndarray, seq_len: int) -> Positions:
    """This project's way: documents one after the other, cut into full sequences of seq_len."""
    computed = (int(lengths.sum()) - 1) // seq_len * seq_len
    begins = np.cumsum(lengths) - lengths  # where in the stream each document begins
    useful = computed - int(np.count_nonzero((begins >= 1) & (begins <= computed)))
    return Positions(computed, useful, lost=int((lengths - 1).sum()) - useful)


def padded(lengths: np.ndarray, seq_len: int) -> Positions:
    """MiniMind's way: each document cut off at seq_len tokens, or filled up to them.

    As in its dataset/lm_dataset.py, seq_len tokens make seq_len - 1 positions with a target.
    """
    kept = np.minimum(lengths, seq_len)
    computed = len(lengths) * (seq_len - 1)
    return Positions(computed, int((kept - 1).sum()), lost=int((lengths - kept).sum()))


def padded_to_longest(lengths: np.ndarray, seq_len: int, batch_size: int) -> Positions:
    """The same in shuffled batches, each filled up to its own longest document only."""
    kept = np.random.default_rng(SEED).permutation(np.minimum(lengths, seq_len))
    first = np.arange(0, len(kept), batch_size)
    rows = np.diff(first, append=len(kept))
    computed = int((rows * (np.maximum.reduceat(kept, first) - 1)).sum())
    return Positions(computed, int((kept - 1).sum()), lost=int((lengths - kept).sum()))


def padding_table(packed_data: Path, seq_len: int, batch_size: int, speed: float) -> str:
    """Of prepared data that are trained at this speed, in positions per second."""
    lengths = document_lengths(packed_data)
    ways = {
        "packed": packed(lengths, seq_len),
        f"padded to {seq_len}": padded(lengths, seq_len),
        f"padded to the longest of {batch_size}": padded_to_longest(lengths, seq_len, batch_size),
    }
    useful = {way: positions.useful / positions.computed for way, positions in ways.items()}
    tokens = int((lengths - 1).sum())
    rows = [
        {
            "way": way,
            "useful tokens per position": f"{useful[way]:.4f}",
            "tokens of text lost": f"{positions.lost:,} ({positions.lost / tokens:.2%})",
            "training, positions/s": f"{speed:,.0f}",
            "useful tokens/s": f"{useful[way] * speed:,.0f}",
            "against padding": f"{useful[way] / useful[f'padded to {seq_len}']:.2f} ×",
        }
        for way, positions in ways.items()
    ]
    return (
        f"Packing against padding at max_seq_len {seq_len}. A position is useful if its target is "
        "a token or the end of a document, and is taken to cost the same whichever way.\n\n"
        + table(rows)
    )
