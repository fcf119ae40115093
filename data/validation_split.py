"""The validation split: a document is held out if its hash / 2^64 is below the share.

The split of a document depends only on its text, not on its file or on other documents. If no
hash is below the share, data/packing.py holds out the document with the smallest hash.
"""

import hashlib
from dataclasses import dataclass


def hash_of(content: bytes, digest_size: int = 8) -> int:
    """Return 64 bits of the BLAKE2b hash. The bits also depend on digest_size."""
    digest = hashlib.blake2b(content, digest_size=digest_size).digest()
    return int.from_bytes(digest[:8], "little")


@dataclass
class ValidationSplit:
    """Divide documents between training and validation by hash / 2^64."""

    share: float  # share of documents for validation, in [0, 1)
    least: float = 2.0  # smallest hash / 2^64 so far
    greatest: float = -1.0  # largest hash / 2^64 so far

    def takes(self, number: int) -> bool:
        """Return True if the document with this hash is for validation."""
        place = number / 2**64
        self.least = min(self.least, place)
        self.greatest = max(self.greatest, place)
        return place < self.share
