"""The order in which samples are read: a shuffle that stores no list, divided among processes.

The processes together read one endless stream of samples. The sample at a position depends on the
seed, but not on the number of processes. Therefore a resumed run with the same seed and global
batch continues with the same samples on any number of processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

ROUNDS = 6  # of the Feistel network in `shuffled`


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finalizer (Steele et al., 2014). An input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Shuffle range(n) and return the entries at `positions`. (seed, epoch) determines the order.
    Positions are int64 in [0, n). A Feistel network permutes the numbers below a power of four ≥ n.
    A result of n or more is permuted again (cycle walking; Black and Rogaway, 2002)."""
    half_bits = np.uint64(max(1, -(-int(n - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half_bits)) - 1)
    keys = np.random.SeedSequence([epoch, seed]).generate_state(ROUNDS, np.uint64)

    def permute(x: np.ndarray) -> np.ndarray:
        left, right = x >> half_bits, x & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << half_bits) | right

    out = permute(positions.astype(np.uint64))
    while (outside := out >= n).any():
        out[outside] = permute(out[outside])
    return out.astype(np.int64)


BLOCK = 64  # micro-batches whose order is computed in one call


@dataclass
class MicroBatchSampler:
    """Endless stream of the micro-batches of one process, each a list of sample indices.
    The global batch at the end of an epoch is filled with the first samples of the next epoch."""

    n_samples: int  # samples in the data set
    batch_size: int  # samples in a micro-batch of one process
    rank: int = 0
    world_size: int = 1
    seed: int = 0  # seed of all shuffles
    start: int = 0  # position at which the run begins: the samples that it has already read

    def __iter__(self) -> Iterator[list[int]]:
        stride = self.world_size * self.batch_size
        first = self.start + self.rank * self.batch_size
        # Shuffling 1,000 numbers takes 1 to 6 times as long as shuffling 8: one call does a block.
        block = first + stride * np.arange(BLOCK)[:, None] + np.arange(self.batch_size)
        while True:
            yield from self.indices(block).tolist()
            block += BLOCK * stride

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at these positions. Each epoch has n_samples positions."""
        epochs, within = np.divmod(positions, self.n_samples)
        out = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            out[chosen] = shuffled(within[chosen], self.n_samples, self.seed, int(epoch))
        return out


def spread(n: int, most: int) -> list[int]:
    """Return at most `most` (0: all) of the integers 0..n-1, in order and evenly spaced."""
    return np.linspace(0, n - 1, n if most == 0 else min(n, most)).astype(int).tolist()
