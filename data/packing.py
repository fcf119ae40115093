"""Pack conversations into rows of one length, so that training blocks are compiled only once."""

import numpy as np

from data.order import shuffled


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
    first = np.full(n_rows, n)
    np.minimum.at(first, row_of, np.arange(n))
    row_of = np.argsort(np.argsort(first))[row_of]
    starts = np.cumsum(np.bincount(row_of)) - np.bincount(row_of)
    return np.argsort(row_of, kind="stable"), np.append(starts, n)


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
