"""Subword regularisation: the same text cut into pieces in more ways than one.

A small text is read several times, and a model that meets it in one form learns it by heart. Cut
differently each time, it also shows how words are spelled. BPE-dropout (Provilkov et al., 2020,
https://arxiv.org/abs/1910.13267) skips merges; here finished pieces are split again.
"""

from functools import lru_cache

import numpy as np

from data.tokenizer import Tokenizer

SHARE = 0.1  # of the pieces that are split in each round
ROUNDS = 2  # a piece that was split may be split again


@lru_cache(maxsize=1)
def ways_to_split(tokenizer: Tokenizer) -> dict[int, list[tuple[int, int]]]:
    """Return id → the pairs of ids that spell the same text, for each piece of text."""
    pieces = tokenizer.pieces_of_text
    return {
        id: [
            (pieces[text[:at]], pieces[text[at:]])
            for at in range(1, len(text))
            if text[:at] in pieces and text[at:] in pieces
        ]
        for text, id in pieces.items()
    }


def split_at_random(ids: list[int], tokenizer: Tokenizer, rng: np.random.Generator) -> list[int]:
    """Return ids of the same text, in which some pieces are split into two or more."""
    ways_of = ways_to_split(tokenizer)
    for _ in range(ROUNDS):
        found = []
        for id, drawn in zip(ids, rng.random(len(ids)).tolist(), strict=True):
            ways = drawn < SHARE and ways_of.get(id)
            found += ways[int(drawn / SHARE * len(ways))] if ways else (id,)
        ids = found
    return ids
