import numpy as np
import pytest

from lm.data.conversation_set import pack


def rows_of(lengths, size: int) -> list[list[int]]:
    packed, starts = pack(np.asarray(lengths), size)
    return [part.tolist() for part in np.split(packed, starts[1:-1])]


def lognormal(mean: float, deviation: float, size: int) -> np.ndarray:
    found = np.random.default_rng(0).lognormal(mean, deviation, 20_000)
    return found.astype(int).clip(1, size)


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        (lognormal(3.5, 0.5, 256), 256),
        (lognormal(5.8, 0.8, 1024), 1024),
        (lognormal(4.8, 0.3, 512), 512),
    ],
)
def test_rows_hold_each_conversation_once_and_short_conversations_fill_them(lengths, size):
    rows = rows_of(lengths, size)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert max(lengths[row].sum() for row in rows) <= size
    assert lengths.sum() > 0.98 * len(rows) * size


@pytest.mark.parametrize(
    ("lengths", "n_rows"),
    [([8], 1), ([1] * 16, 2), ([8, 5, 3, 4, 4], 3), ([6, 3, 3, 2, 2], 2), ([5] * 4, 4)],
)
def test_few_conversations_are_packed_into_as_few_rows_as_possible(lengths, n_rows):
    assert len(rows_of(lengths, 8)) == n_rows


def test_rows_never_change_and_are_ordered_by_their_first_conversations():
    """If the rows changed, a resumed run would read some conversations twice and miss others."""
    lengths = [7, 2, 8, 1, 3, 5, 3, 2, 4, 1]
    assert rows_of(lengths, 8) == [[0, 3], [1, 7, 8], [2], [4, 9], [5, 6]]
    assert rows_of([8] * 50, 8) == [[i] for i in range(50)]
