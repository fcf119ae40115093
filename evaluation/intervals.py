"""95% confidence intervals for what an evaluation reports.

Tokens of one document resemble each other, so they are no independent observations: an interval
from the spread of single tokens would be far too narrow. The unit here is what was drawn
independently, a document or a question.
"""

import math
from dataclasses import dataclass

import numpy as np

Z = 1.96  # standard errors on either side hold 95% of a normal distribution
LEAST_UNITS = 3


@dataclass(frozen=True)
class Estimate:
    """A number and the ends of its 95% interval, None where there are too few units for one."""

    value: float
    low: float | None
    high: float | None

    def map(self, increasing) -> "Estimate":
        """Apply an increasing function to the number and to the ends of its interval."""
        numbers = (self.value, self.low, self.high)
        return Estimate(*(None if x is None else increasing(x) for x in numbers))


class UnitSums:
    """Sums over independent units, from which ratios of totals and their intervals follow.

    Only the totals of the `size` numbers that are measured on each unit and the sums of their
    products are kept, so memory does not grow with the units.
    """

    def __init__(self, size: int):
        self.n = 0
        self.totals = np.zeros(size)
        self._products = np.zeros((size, size))

    def add(self, values: np.ndarray) -> None:
        """Add one unit's numbers, float64 of shape (size,)."""
        self.n += 1
        self.totals += values
        self._products += np.outer(values, values)

    def ratio(self, top: int, bottom: int) -> Estimate:
        """Return the total of one number over the total of another, as loss is nats over tokens.

        Units differ in length, so both totals are random: with R the ratio and n units, the
        variance of R is about n / (n - 1) · Σ (top - R · bottom)² / (Σ bottom)² (Cochran, Sampling
        Techniques, 3rd ed. 1977, section 6.4). The interval is R ± 1.96 standard errors. Nothing
        that is measured here is negative, so no interval reaches below 0.
        """
        r = self.totals[top] / self.totals[bottom]
        if self.n < LEAST_UNITS:
            return Estimate(float(r), None, None)
        direction = np.zeros(len(self.totals))
        direction[top], direction[bottom] = 1.0, -r
        squares = max(0.0, direction @ self._products @ direction)  # rounding may go below 0
        half = Z * math.sqrt(self.n / (self.n - 1) * squares) / self.totals[bottom]
        return Estimate(float(r), float(max(0.0, r - half)), float(r + half))


def wilson(successes: float, n: int) -> Estimate:
    """Return the share of n independent questions that were right, with Wilson's score interval.

    Unlike p ± 1.96 standard errors it holds for small n and for shares near 0 and 1. Source:
    Wilson, Journal of the American Statistical Association 22 (1927), 209-212.
    """
    p = successes / n
    centre = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half))
