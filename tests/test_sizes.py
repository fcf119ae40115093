from itertools import pairwise

from data.sizes import BY_SIZE, suited_to


def test_every_size_has_its_settings():
    sizes = (0, 499_999, 500_000, 12_100_000, 10**12)
    assert [suited_to(n) for n in sizes] == [BY_SIZE[i] for i in (0, 0, 1, 3, -1)]


def test_a_smaller_text_has_more_validation_in_smaller_documents():
    for smaller, larger in pairwise(BY_SIZE):
        assert smaller.below < larger.below
        assert smaller.vocab_size <= larger.vocab_size
        assert smaller.val_fraction >= larger.val_fraction
        assert smaller.section_bytes <= larger.section_bytes
    for row in BY_SIZE:  # one long .txt of half the size still has many documents for validation
        assert min(row.below, 1e9) / 2 * row.val_fraction / row.section_bytes > 20
