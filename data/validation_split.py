"""The validation split: a document is held out if its hash lies below the share asked for.

The same text always falls on the same side, wherever it stands and whatever stands beside it.
"""

import hashlib
from dataclasses import dataclass


def hash_of(content: bytes, digest_size: int = 8) -> int:
    """Return 64 bits of BLAKE2b; each digest_size makes another hash."""
    digest = hashlib.blake2b(content, digest_size=digest_size).digest()
    return int.from_bytes(digest[:8], "little")


@dataclass
class ValidationSplit:
    """Divide documents by their hashes over 2^64, and remember the extremes."""

    share: float  # of the documents, in [0, 1)
    least: float = 2.0
    greatest: float = -1.0

    def takes(self, number: int) -> bool:
        """Return whether the document with this hash is for validation."""
        place = number / 2**64
        self.least = min(self.least, place)
        self.greatest = max(self.greatest, place)
        return place < self.share
