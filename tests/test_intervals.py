import math

import numpy as np
import pytest

from evaluation.intervals import Estimate, UnitSums, wilson


def ratio_of(units) -> Estimate:
    sums = UnitSums(2)
    for unit in units:
        sums.add(np.asarray(unit, float))
    return sums.ratio(0, 1)


def test_the_interval_by_hand():
    units = [(2.0, 4), (9.0, 10), (3.0, 3), (5.0, 8)]
    r = 19 / 25  # of the totals, not the mean of ratios
    residuals = [top - r * bottom for top, bottom in units]
    half = 1.96 * math.sqrt(4 / 3 * sum(x * x for x in residuals)) / 25
    estimate = ratio_of(units)
    assert estimate.value == r
    assert (estimate.low, estimate.high) == pytest.approx((r - half, r + half))


def test_units_that_agree_have_no_width_and_too_few_units_no_interval():
    agree = ratio_of([(3, 1), (6, 2), (9, 3)])
    assert (agree.low, agree.value, agree.high) == pytest.approx((3, 3, 3))
    few = ratio_of([(1, 2)] * 2)
    assert few == Estimate(0.5, None, None)
    assert few.map(math.exp) == Estimate(math.exp(0.5), None, None)
    assert Estimate(1.0, 0.0, 2.0).map(math.exp) == Estimate(math.e, 1.0, math.exp(2))


def test_intervals_hold_the_truth_in_95_of_100_cases():
    """Documents of very different lengths, each with a level of its own."""
    rng = np.random.default_rng(1)
    hits, repeats, documents, truth = 0, 1000, 60, 3.0
    for _ in range(repeats):
        lengths = np.ceil(rng.lognormal(4, 0.7, documents))
        levels = rng.normal(truth, 0.5, documents)  # does not depend on the length
        totals = lengths * levels + rng.normal(0, 2.0, documents) * np.sqrt(lengths)
        estimate = ratio_of(np.stack([totals, lengths], axis=1))
        hits += estimate.low <= truth <= estimate.high
    assert 0.92 <= hits / repeats <= 0.97


def test_wilsons_interval_is_the_published_one():
    """81 of 263 is Newcombe's example (Statistics in Medicine 17, 1998)."""
    for right, n, low, high in ((0, 10, 0.0, 0.2775), (81, 263, 0.2553, 0.3662)):
        found = (wilson(right, n).value, wilson(right, n).low, wilson(right, n).high)
        assert found == pytest.approx((right / n, low, high), abs=5e-5)
