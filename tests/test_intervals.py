import math

import numpy as np
import pytest

from evaluation.intervals import Estimate, UnitSums, student_t, wilson


def sums_of(units) -> UnitSums:
    sums = UnitSums(2)
    for unit in units:
        sums.add(np.asarray(unit, float))
    return sums


def covered(estimate: Estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


@pytest.mark.parametrize(
    ("degrees", "table", "within"),
    [
        (2, 4.303, 0.04),
        (4, 2.776, 0.003),
        (10, 2.228, 1e-3),
        (30, 2.042, 1e-3),
        (10**9, 1.96, 1e-4),
    ],
)
def test_students_t_is_that_of_the_printed_tables(degrees, table, within):
    assert student_t(degrees) == pytest.approx(table, rel=within)


def test_the_ratio_is_that_of_the_totals_and_not_the_mean_of_ratios():
    assert sums_of([(1, 1), (1, 1), (10, 100)]).ratio(0, 1).value == 12 / 102


def test_the_interval_by_hand():
    units = [(2.0, 4), (9.0, 10), (3.0, 3), (5.0, 8)]
    r = 19 / 25
    residuals = [top - r * bottom for top, bottom in units]
    variance = 4 / 3 * sum(x * x for x in residuals) / 25**2
    estimate = sums_of(units).ratio(0, 1)
    assert estimate.high - r == pytest.approx(student_t(3) * math.sqrt(variance))
    assert r - estimate.low == pytest.approx(student_t(3) * math.sqrt(variance))


def test_units_of_equal_length_give_the_textbook_interval_of_a_mean():
    rng = np.random.default_rng(0)
    values = rng.normal(3, 1, 50)
    estimate = sums_of((7 * value, 7) for value in values).ratio(0, 1)
    half = student_t(49) * values.std(ddof=1) / math.sqrt(50)
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.high - estimate.value == pytest.approx(half)


def test_units_that_agree_have_an_interval_of_no_width():
    estimate = sums_of([(3, 1), (6, 2), (9, 3)]).ratio(0, 1)
    assert estimate == pytest.approx((3, 3, 3))


@pytest.mark.parametrize("n", [1, 2])
def test_too_few_units_give_no_interval(n):
    assert sums_of([(1, 2)] * n).ratio(0, 1) == Estimate(0.5, None, None)


def test_an_increasing_function_maps_the_ends_and_leaves_out_what_is_missing():
    assert Estimate(1.0, 0.0, 2.0).map(math.exp) == (math.e, 1.0, math.exp(2))
    assert Estimate(1.0, None, None).map(math.exp) == (math.e, None, None)


def test_intervals_hold_the_truth_in_95_of_100_cases_where_token_intervals_do_not():
    """Documents of very different lengths, each with a level of its own."""
    rng = np.random.default_rng(1)
    hits = token_hits = 0
    repeats, documents, truth = 1000, 60, 3.0
    for _ in range(repeats):
        lengths = np.ceil(rng.lognormal(4, 0.7, documents))
        levels = rng.normal(truth, 0.5, documents)  # does not depend on the length
        totals = lengths * levels + rng.normal(0, 2.0, documents) * np.sqrt(lengths)
        estimate = sums_of(np.stack([totals, lengths], axis=1)).ratio(0, 1)
        hits += covered(estimate, truth)
        half = 1.96 * math.sqrt(2.0**2 + 0.5**2) / math.sqrt(lengths.sum())  # as if independent
        token_hits += abs(estimate.value - truth) <= half
    assert 0.93 <= hits / repeats <= 0.97
    assert token_hits / repeats < 0.75


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        (5, 10, 0.2366, 0.7634),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilsons_interval_is_the_published_one(right, n, low, high):
    """81 of 263 is Newcombe's example (Statistics in Medicine 17, 1998)."""
    assert wilson(right, n) == pytest.approx((right / n, low, high), abs=5e-5)


@pytest.mark.parametrize("p", [0.05, 0.25, 0.9])
def test_wilsons_interval_holds_the_truth_in_95_of_100_cases(p):
    rights = np.random.default_rng(2).binomial(100, p, 4000)
    assert 0.93 <= np.mean([covered(wilson(int(right), 100), p) for right in rights]) <= 0.98
