"""Default settings of preparation for a text of each size.

A small text is learned by heart before a vocabulary made for a large one is learned at all, and one
document of sixteen kilobytes is no validation.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from data.corpus import text_size


class Suited(NamedTuple):
    """Settings for a text of less than `below` bytes."""

    below: float
    vocab_size: int
    val_fraction: float
    section_bytes: int  # a longer .txt is cut into documents of that size
    segmentations: int  # see data/segmentation.py


BY_SIZE = (
    Suited(500e3, 512, 0.1, 1 << 10, 7),
    Suited(4e6, 2048, 0.1, 2 << 10, 7),
    Suited(10e6, 4096, 0.05, 2 << 10, 1),
    Suited(50e6, 6400, 0.03, 4 << 10, 1),  # the built-in text
    Suited(math.inf, 6400, 0.02, 16 << 10, 1),
)


def suited_to(files: Iterable[str]) -> Suited:
    """Return the settings for the text of these files. They go in steps, so that a text that grows
    keeps its settings for long."""
    n_bytes = text_size(files)
    return next(suited for suited in BY_SIZE if n_bytes < suited.below)
