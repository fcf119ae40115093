from itertools import islice

import numpy as np
import pytest

from data.order import WINDOW, LengthSampler, MicroBatchSampler, shuffled

SIZES = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 1000, 4095, 4097, 65_537]


def shuffle(n: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return shuffled(np.arange(n), n, seed, epoch).tolist()


@pytest.mark.parametrize("n", SIZES)
def test_a_shuffle_holds_every_number_once(n):
    for seed, epoch in ((0, 0), (1, 0), (42, 3)):
        assert sorted(shuffle(n, seed, epoch)) == list(range(n))


@pytest.mark.parametrize("n", [10**9, 2**40 + 1])
def test_the_middle_of_a_huge_shuffle_is_reached_at_once(n):
    positions = np.concatenate([np.arange(1000), n // 2 + np.arange(1000), n - 1 - np.arange(1000)])
    out = shuffled(positions, n, 0, 0)
    assert out.dtype == np.int64
    assert out.min() >= 0
    assert out.max() < n
    assert len(set(out.tolist())) == 3000


def test_a_position_does_not_care_which_others_are_asked_for():
    whole = shuffle(1000, seed=5, epoch=2)
    some = np.array([999, 3, 500, 3])
    assert shuffled(some, 1000, 5, 2).tolist() == [whole[i] for i in some]


def test_every_seed_and_epoch_has_a_shuffle_of_its_own():
    shuffles = {tuple(shuffle(50, seed, epoch)) for seed in range(20) for epoch in range(20)}
    assert len(shuffles) == 400


def test_a_seed_beyond_32_bits_does_not_run_into_the_epochs():
    assert shuffle(50, seed=2**32 + 5, epoch=0) != shuffle(50, seed=5, epoch=1)


def test_a_shuffle_is_a_function_of_its_arguments():
    assert shuffle(500, 3, 4) == shuffle(500, 3, 4)


def chi_square(counts: np.ndarray) -> float:
    """Pearson's statistic against equal counts, per degree of freedom: near 1 if they are."""
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum() / (counts.size - 1))


@pytest.mark.parametrize("n", [3, 4, 5, 10, 17, 64])
def test_over_the_epochs_a_position_lands_everywhere_alike(n):
    landed = np.array([shuffle(n, seed=1, epoch=epoch) for epoch in range(1000)])
    for position in {0, 1, n // 2, n - 1}:
        assert (
            chi_square(np.bincount(landed[:, position], minlength=n)) < 1 + 5 * (2 / (n - 1)) ** 0.5
        )


@pytest.mark.parametrize("n", [10_000, 65_536, 100_003])
def test_a_stretch_of_a_shuffle_comes_from_everywhere_alike(n):
    for seed in range(5):
        stretch = shuffled(np.arange(n // 3, n // 3 + 3200), n, seed, 0)
        assert chi_square(np.bincount(stretch * 32 // n, minlength=32)) < 2.3


def test_neighbours_are_not_kept_together():
    out = np.array(shuffle(10_000))
    steps = np.diff(out)
    assert np.abs(steps).mean() == pytest.approx(10_000 / 3, rel=0.05)
    assert (steps == 1).sum() < 10
    assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 0.05


def take(n_micro_batches: int, **settings) -> list[list[int]]:
    return list(islice(MicroBatchSampler(**settings), n_micro_batches))


def stream(n: int, **settings) -> list[int]:
    """The first n samples in the order in which all processes together consume them."""
    return [sample for batch in take(n, batch_size=1, **settings) for sample in batch]


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 1), (1, 6), (2, 3), (4, 3), (3, 4)])
def test_in_one_epoch_each_sample_is_visited_once_by_one_rank(world_size, batch_size):
    n_samples = 48
    visited = []
    for rank in range(world_size):
        batches = take(
            n_samples // (world_size * batch_size),
            n_samples=n_samples,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
        )
        assert all(len(batch) == batch_size for batch in batches)
        visited += [sample for batch in batches for sample in batch]
    assert sorted(visited) == list(range(n_samples))


@pytest.mark.parametrize("start", [0, 12, 96])
@pytest.mark.parametrize(
    ("world_size", "batch_size", "accumulation"),
    [(1, 12, 1), (1, 3, 4), (2, 6, 1), (2, 1, 6), (3, 2, 2), (4, 3, 1), (12, 1, 1)],
)
def test_global_batches_are_the_same_however_they_are_divided(
    world_size, batch_size, accumulation, start
):
    steps, n_samples = 10, 50  # more than two epochs
    ranks = [
        take(
            steps * accumulation,
            n_samples=n_samples,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            seed=9,
            start=start,
        )
        for rank in range(world_size)
    ]
    expected = stream(steps * 12, n_samples=n_samples, seed=9, start=start)
    for step in range(steps):
        micro_batches = [
            batch
            for batches in ranks
            for batch in batches[step * accumulation : (step + 1) * accumulation]
        ]
        global_batch = sorted(sample for batch in micro_batches for sample in batch)
        assert global_batch == sorted(expected[step * 12 : (step + 1) * 12])


@pytest.mark.parametrize("k", [1, 7, 10, 23, 1000])
def test_a_start_continues_the_stream_exactly(k):
    settings = {"n_samples": 10, "seed": 4}
    assert stream(25, start=k, **settings) == stream(k + 25, **settings)[k:]


@pytest.mark.parametrize("batch_size", [1, 3, 4, 25])
def test_epochs_follow_without_a_seam_each_whole_and_in_an_order_of_its_own(batch_size):
    batches = take(-(-30 // batch_size), n_samples=10, batch_size=batch_size)
    assert {len(batch) for batch in batches} == {batch_size}
    samples = [sample for batch in batches for sample in batch]
    epochs = [samples[:10], samples[10:20], samples[20:30]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs == [shuffle(10, epoch=epoch) for epoch in range(3)]


def test_two_iterations_of_one_sampler_begin_alike():
    sampler = MicroBatchSampler(n_samples=20, batch_size=4, seed=1)
    assert list(islice(sampler, 8)) == list(islice(sampler, 8))


def test_samples_are_plain_integers():
    assert {type(sample) for batch in take(3, n_samples=9, batch_size=3) for sample in batch} == {
        int
    }


LENGTHS = np.random.default_rng(0).geometric(0.02, 700)


def by_length(steps: int, world_size: int, batch_size: int, accumulation: int, **settings):
    """The global batches of so many steps, each a list of micro-batches, and the sampler."""
    size = world_size * batch_size * accumulation
    samplers = [
        LengthSampler(
            len(LENGTHS),
            batch_size,
            rank=rank,
            world_size=world_size,
            lengths=LENGTHS,
            global_batch=size,
            **settings,
        )
        for rank in range(world_size)
    ]
    ranks = [list(islice(sampler, steps * accumulation)) for sampler in samplers]
    return [
        [batches[step * accumulation + at] for at in range(accumulation) for batches in ranks]
        for step in range(steps)
    ]


@pytest.mark.parametrize("start", [0, 8, 8 * WINDOW, 800])
@pytest.mark.parametrize(
    ("world_size", "batch_size", "accumulation"), [(2, 4, 1), (4, 2, 1), (4, 1, 2), (1, 2, 4)]
)
def test_rows_of_like_length_make_the_same_global_batches_however_they_are_divided(
    world_size, batch_size, accumulation, start
):
    steps = 200  # more than two epochs
    whole = by_length(steps, 1, 8, 1, seed=9, start=start)
    divided = by_length(steps, world_size, batch_size, accumulation, seed=9, start=start)
    for (expected,), micro_batches in zip(whole, divided, strict=True):
        flat = [sample for micro_batch in micro_batches for sample in micro_batch]
        assert flat == expected  # in the same order, too


def test_rows_of_like_length_continue_exactly_after_a_stop():
    whole = by_length(150, 2, 4, 1, seed=3)
    for step in (1, 31, 32, 33, 100):
        assert by_length(50, 2, 4, 1, seed=3, start=8 * step) == whole[step : step + 50]


def test_rows_of_like_length_are_all_of_the_same_windows_of_the_stream():
    size = 8 * min(WINDOW, len(LENGTHS) // 32)
    batches = by_length(300, 1, 8, 1, seed=5)
    samples = [sample for batch in batches for micro_batch in batch for sample in micro_batch]
    expected = stream(2400, n_samples=len(LENGTHS), seed=5)
    for at in range(0, 2400 - size, size):
        assert sorted(samples[at : at + size]) == sorted(expected[at : at + size])
    assert samples != expected


def test_a_global_batch_has_rows_of_like_length_and_batches_come_in_any_order():
    lengths = [LENGTHS[batch[0]] for batch in by_length(WINDOW // 2, 1, 8, 1)]
    assert np.mean([batch.max() - batch.min() for batch in lengths]) < 0.3 * LENGTHS.std()
    medians = [np.median(batch) for batch in lengths]
    assert medians != sorted(medians)
    other = [LENGTHS[batch[0]] for batch in by_length(WINDOW // 2, 1, 8, 1, seed=1)]
    assert [b.tolist() for b in lengths] != [b.tolist() for b in other]


def test_a_few_rows_are_still_an_epoch_each_before_they_come_again():
    sampler = LengthSampler(10, 4, lengths=np.arange(10), global_batch=4)
    samples = [sample for batch in islice(sampler, 5) for sample in batch]
    assert sorted(samples) == sorted(2 * list(range(10)))
    assert all(len(set(batch)) == 4 for batch in islice(sampler, 2))
