from itertools import islice

import numpy as np
import pytest

from lm.data.order import MicroBatchSampler, shuffled


def shuffle(n: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return shuffled(np.arange(n), n, seed, epoch).tolist()


@pytest.mark.parametrize("n", [1, 2, 4, 5, 16, 17, 1000])
def test_a_shuffle_holds_every_number_once(n):
    for seed, epoch in ((0, 0), (1, 0), (42, 3)):
        assert sorted(shuffle(n, seed, epoch)) == list(range(n))


def test_orders_never_change():
    """If the order changed, a resumed run would read some samples twice and miss others."""
    assert shuffled(np.arange(9), 9, seed=3, epoch=1).tolist() == [0, 8, 4, 6, 7, 3, 5, 1, 2]
    far = shuffled(np.arange(2), 10**12, seed=2**40, epoch=7)
    assert far.tolist() == [62335652399, 392173342924]


def take(n_micro_batches: int, **settings) -> list[list[int]]:
    return list(islice(MicroBatchSampler(**settings), n_micro_batches))


def stream(n: int, **settings) -> list[int]:
    """Return the first n samples that a single process reads in micro-batches of one sample."""
    return [sample for batch in take(n, batch_size=1, **settings) for sample in batch]


@pytest.mark.parametrize("start", [0, 12, 67])
@pytest.mark.parametrize(
    ("world_size", "batch_size", "accumulation"), [(1, 12, 1), (1, 3, 4), (2, 1, 6), (3, 2, 2)]
)
def test_global_batches_are_the_same_however_divided(world_size, batch_size, accumulation, start):
    steps, settings = 10, {"n_samples": 50, "seed": 9, "start": start}  # 2.4 epochs
    n = steps * accumulation
    same = settings | {"batch_size": batch_size, "world_size": world_size}
    ranks = [take(n, rank=rank, **same) for rank in range(world_size)]
    in_turn = [sample for batches in zip(*ranks, strict=True) for b in batches for sample in b]
    assert in_turn == stream(steps * 12, **settings)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 25])
def test_epochs_follow_without_a_gap_each_complete_and_in_its_own_order(batch_size):
    batches = take(-(-30 // batch_size), n_samples=10, batch_size=batch_size)
    assert {len(batch) for batch in batches} == {batch_size}
    samples = [sample for batch in batches for sample in batch]
    epochs = [samples[:10], samples[10:20], samples[20:30]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs == [shuffle(10, epoch=epoch) for epoch in range(3)]
