"""The order in which samples are read: a shuffle that needs no list, divided among processes.

The position in the data is the number of samples consumed by all processes. The sample there
depends on it and the seed alone, so training continues with the same samples after a stop, or on
another number of processes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

ROUNDS = 6


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele et al., 2014): every input bit changes every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the numbers, int64, at the positions, int64 in [0, n), of the shuffle of range(n) that
    (seed, epoch) names.

    A Feistel network permutes the numbers below the next power of four; a result of n or more is
    permuted again (cycle walking; Black and Rogaway, 2002). So a shuffle takes no memory.
    """
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


BLOCK = 64  # micro-batches whose order is computed at once


@dataclass
class MicroBatchSampler:
    """Endless stream of one process's micro-batches, each a list of sample indices. A global batch
    that reaches past the end of an epoch is filled from the start of the next."""

    n_samples: int  # in the data set
    batch_size: int  # samples in a micro-batch of one process
    rank: int = 0  # of this process
    world_size: int = 1
    seed: int = 0  # of the shuffles
    start: int = 0  # samples consumed before, by all processes together

    def __iter__(self) -> Iterator[list[int]]:
        stride = self.world_size * self.batch_size
        first = self.start + self.rank * self.batch_size
        # A block at a time: eight numbers cost as much as a thousand.
        block = first + stride * np.arange(BLOCK)[:, None] + np.arange(self.batch_size)
        while True:
            yield from self.indices(block).tolist()
            block += BLOCK * stride

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at these positions of the stream of all epochs."""
        return _in_rounds(
            positions,
            self.n_samples,
            lambda epoch, within: shuffled(within, self.n_samples, self.seed, epoch),
        )


def _in_rounds(positions: np.ndarray, size: int, of_round: Callable) -> np.ndarray:
    """Return of_round(round, positions within it) for each round of that size."""
    rounds, within = np.divmod(positions, size)
    out = np.empty_like(positions)
    for number in np.unique(rounds):
        chosen = rounds == number
        out[chosen] = of_round(int(number), within[chosen])
    return out


WINDOW = 32  # global batches that are sorted by length together


@dataclass(kw_only=True)
class LengthSampler(MicroBatchSampler):
    """A stream in which rows of like length share a global batch, so that little is padding.

    The shuffled epochs are cut into windows, whose samples are sorted by length and cut into
    global batches, which are shuffled. However one is divided, it is the same.
    """

    lengths: np.ndarray  # of all samples
    global_batch: int  # samples of one step, of all processes together

    def __post_init__(self):
        # A window over two epochs would bring copies together.
        batches = min(WINDOW, max(1, self.n_samples // (4 * self.global_batch)))
        self._shape = batches, self.global_batch

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at these positions of the stream of all windows."""
        batches, size = self._shape

        def of_window(window: int, within: np.ndarray) -> np.ndarray:
            first = window * batches * size
            samples = MicroBatchSampler.indices(self, np.arange(first, first + batches * size))
            by_length = samples[np.argsort(self.lengths[samples], kind="stable")]
            order = shuffled(np.arange(batches), batches, self.seed, window)
            return by_length.reshape(self._shape)[order].ravel()[within]

        return _in_rounds(positions, batches * size, of_window)
