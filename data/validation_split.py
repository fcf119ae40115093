"""The validation split: a document is held out if its hash lies below the share asked for.

The same text always falls on the same side, wherever it stands and however often. Adding or
reordering documents moves none of the others.
"""

import hashlib
import math
from dataclasses import dataclass

HASHES = 2**64


def hashes(content: bytes, n: int) -> list[int]:
    """Return n independent hashes of the content, each in [0, HASHES)."""
    digest = hashlib.blake2b(content, digest_size=8 * n).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(n)]


@dataclass
class ValidationSplit:
    """Divide documents by their hash, and remember the extremes of the hashes seen."""

    share: float  # of the documents, in [0, 1)
    least: float = 2.0
    greatest: float = -1.0

    def takes(self, where: float) -> bool:
        """Return whether a document is for validation; `where` is its hash over HASHES."""
        self.least = min(self.least, where)
        self.greatest = max(self.greatest, where)
        return where < self.share

    def with_one_document(self) -> "ValidationSplit":
        """Return a split that takes the document with the least hash, for a corpus so small that
        no hash lies below the share; without two different documents the same split."""
        if self.share == 0 or self.least >= self.greatest:
            return self
        return ValidationSplit(math.nextafter(self.least, 1))
