"""95% confidence intervals for what an evaluation reports.

Tokens of one document resemble each other, so they are no independent observations: an interval
from the spread of single tokens would be far too narrow. The unit here is what was drawn
independently, a document or a question.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

Z = NormalDist().inv_cdf(0.975)
LEAST_UNITS = 3


class Estimate(NamedTuple):
    """A number and the ends of its 95% interval, None where there are too few units for one."""

    value: float
    low: float | None
    high: float | None

    def map(self, increasing) -> "Estimate":
        """The same for an increasing function of the number, which keeps the coverage."""
        return Estimate(*(None if x is None else increasing(x) for x in self))


class UnitSums:
    """Sums over independent units, from which ratios of totals and their intervals follow.

    Totals of the `size` numbers that are measured on each unit, and sums of their products, are all
    that is kept, so memory does not grow with the units.
    """

    def __init__(self, size: int):
        self.n = 0
        self.totals = np.zeros(size)
        self._products = np.zeros((size, size))

    def add(self, values: np.ndarray) -> None:
        """One unit's numbers, float64 of shape (size,)."""
        self.n += 1
        self.totals += values
        self._products += np.outer(values, values)

    def ratio(self, top: int, bottom: int) -> Estimate:
        """Total of the one number over total of the other, as loss is nats over tokens.

        Units differ in length, so both totals are random and the interval is that of a ratio
        estimator: with R the ratio and n units, its variance is about
        n / (n - 1) · Σ (top - R · bottom)² / (Σ bottom)² (Cochran, Sampling Techniques, 3rd ed.
        1977, section 6.4), and the interval takes Student's t with n - 1 degrees of freedom.
        Nothing that is measured here is negative, so no interval reaches below 0.
        """
        r = self.totals[top] / self.totals[bottom]
        if self.n < LEAST_UNITS:
            return Estimate(float(r), None, None)
        direction = np.zeros(len(self.totals))
        direction[top], direction[bottom] = 1.0, -r
        squares = max(0.0, direction @ self._products @ direction)  # rounding may go below 0
        variance = self.n / (self.n - 1) * squares / self.totals[bottom] ** 2
        half = student_t(self.n - 1) * math.sqrt(variance)
        return Estimate(float(r), float(max(0.0, r - half)), float(r + half))


def student_t(degrees: int) -> float:
    """The 97.5% quantile of Student's t, within 4% for 2 degrees of freedom and 0.3% from 4 on.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z, v = Z, degrees
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / v**power for power, term in enumerate(terms, 1))


def wilson(successes: float, n: int) -> Estimate:
    """The share of n independent questions that were right, with Wilson's score interval.

    Source: Wilson, Journal of the American Statistical Association 22 (1927), 209-212. Unlike the
    textbook's p ± z·sqrt(p(1-p)/n) it holds for small n and for shares near 0 and 1.
    """
    p = successes / n
    centre = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half))
