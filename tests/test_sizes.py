from itertools import pairwise

import pytest

from data.sizes import BY_SIZE, suited_to


def test_every_size_has_its_row_and_the_rows_go_up():
    assert [suited_to(n) for n in (0, 1_115_394, 12_100_000, 10**12)] == [
        BY_SIZE[0],
        BY_SIZE[1],
        BY_SIZE[3],
        BY_SIZE[-1],
    ]
    assert [row.below for row in BY_SIZE] == sorted(row.below for row in BY_SIZE)


@pytest.mark.parametrize("row", BY_SIZE[:-1])
def test_a_size_on_the_border_belongs_to_the_larger_ones(row):
    assert suited_to(int(row.below) - 1) == row
    assert suited_to(int(row.below)) == BY_SIZE[BY_SIZE.index(row) + 1]


def test_the_smaller_a_text_the_more_of_it_and_in_smaller_pieces_is_for_validation():
    for smaller, larger in pairwise(BY_SIZE):
        assert smaller.vocab_size <= larger.vocab_size
        assert smaller.val_fraction >= larger.val_fraction
        assert smaller.section_bytes <= larger.section_bytes


@pytest.mark.parametrize("row", BY_SIZE)
def test_a_text_that_just_has_a_row_has_many_documents_for_validation(row):
    """Should it be one long .txt, of half the size that the row goes up to."""
    size = min(row.below, 1e9) / 2
    assert size * row.val_fraction / row.section_bytes > 20
