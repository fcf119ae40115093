import numpy as np
import pytest

from data.segmentation import ROUNDS, SHARE, split_at_random, ways_to_split
from data.tokenizer import TOKENIZER_FILE, Tokenizer

TEXT = "12 plus 30 is 42, 句 \u2581 and nothing else. " * 40


@pytest.fixture(scope="module")
def tokenizer(packed) -> Tokenizer:
    return Tokenizer(packed / TOKENIZER_FILE)


def test_the_text_stays_and_its_pieces_become_more(tokenizer):
    ids = tokenizer.encode(TEXT)
    for seed in range(20):
        split = split_at_random(ids, tokenizer, np.random.default_rng(seed))
        assert tokenizer.decode(split) == TEXT
        assert len(split) > len(ids)


def test_the_share_of_pieces_that_are_split_is_as_said(tokenizer):
    """Of a piece that can be split in one way alone, into two that cannot be split."""
    ways_of = ways_to_split(tokenizer)
    pair = next(
        id
        for id, ways in ways_of.items()
        if len(ways) == 1 and not ways_of[ways[0][0]] and not ways_of[ways[0][1]]
    )
    n = 20_000
    split = split_at_random([pair] * n, tokenizer, np.random.default_rng(0))
    whole = (1 - SHARE) ** ROUNDS
    assert split.count(pair) == pytest.approx(n * whole, rel=0.02)
    assert len(split) == n + (n - split.count(pair))


def test_every_way_to_split_a_piece_is_as_likely(tokenizer):
    n, ways_of = 20_000, ways_to_split(tokenizer)
    piece, ways = next((id, ways) for id, ways in ways_of.items() if len(ways) == 2)
    drawn = split_at_random([piece] * n, tokenizer, np.random.default_rng(0))
    first = {way[0] for way in ways}
    counts = [drawn.count(id) for id in first]
    assert len(first) == 2
    assert min(counts) > n * SHARE / 4


def test_markers_and_bytes_are_never_split(tokenizer):
    ids = [tokenizer.bos_id, *tokenizer.encode("\x00\x01"), tokenizer.eos_id]
    assert split_at_random(ids * 500, tokenizer, np.random.default_rng(0)) == ids * 500
