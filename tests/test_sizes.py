from itertools import pairwise
from pathlib import Path

from data.sizes import BY_SIZE, suited_to


def test_every_size_has_its_settings(tmp_path):
    for n_bytes, row in ((0, 0), (499_999, 0), (500_000, 1), (12_100_000, 3), (10**9, -1)):
        with Path(tmp_path / "a.txt").open("wb") as file:
            file.truncate(n_bytes)
        assert suited_to([file.name]) == BY_SIZE[row]


def test_a_smaller_text_has_more_validation_in_smaller_documents():
    for smaller, larger in pairwise(BY_SIZE):
        assert smaller.val_fraction >= larger.val_fraction
        assert smaller.section_bytes <= larger.section_bytes
    for row in BY_SIZE:  # one long .txt of half the size still has many documents for validation
        assert min(row.below, 1e9) / 2 * row.val_fraction / row.section_bytes > 20
