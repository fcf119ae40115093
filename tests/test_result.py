import math

import numpy as np
import pytest

from evaluation.scoring import ratio


def test_the_interval_of_a_ratio_by_hand():
    tops, bottoms = np.array([(2.0, 4), (9, 10), (3, 3), (5, 8)]).T
    r = 19 / 25  # of the totals, not the mean of ratios
    half = 1.96 * math.sqrt(4 / 3 * sum((tops - r * bottoms) ** 2)) / 25
    expected = {"value": r, "low": r - half, "high": r + half}
    assert ratio(tops, bottoms) == pytest.approx(expected)
    scaled = {name: math.exp(end) for name, end in expected.items()}
    assert ratio(tops, bottoms, math.exp) == pytest.approx(scaled)


def test_too_few_units_have_no_interval_and_none_reaches_below_zero():
    two, three = np.array([1.0, 2.0]), np.array([0.0, 0.0, 1.0])
    assert ratio(two, two * 2, math.exp) == {"value": math.exp(0.5), "low": None, "high": None}
    assert ratio(three, np.ones(3))["low"] == 0
