"""Numbers for charts: axes with round ticks, fewer points without losing spikes, short texts."""

import math
import statistics
from dataclasses import dataclass

LOGARITHMIC_FROM = 20  # largest value over the median: a linear axis would show a flat line
TICKS = 5

Points = list[tuple[float, float | None]]  # (step, value); None is a gap in the line


@dataclass
class Axis:
    low: float
    high: float  # above low
    step: float | None  # between ticks; None for powers of ten on a logarithmic axis

    @property
    def logarithmic(self) -> bool:
        return self.step is None

    def share(self, value: float) -> float:
        """Where on the axis a value lies, 0 to 1."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
        return (value - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """About five round numbers with their texts."""
        if self.logarithmic:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            powers = range(first, last + 1, math.ceil((last - first) / TICKS))
            return [(10.0**power, show(10.0**power)) for power in powers]
        first = math.ceil(self.low / self.step - 1e-6)
        last = math.floor(self.high / self.step + 1e-6)
        values = [float(f"{i * self.step:.12g}") for i in range(first, last + 1)]
        if not 1e-3 <= max(map(abs, values)) < 1e4:
            return [(value, show(value)) for value in values]
        decimals = len(f"{self.step:.10f}".rstrip("0").partition(".")[2])
        return [(value, f"{value:,.{decimals}f}") for value in values]


def count_axis(end: float) -> Axis:
    """From zero exactly to `end`, for steps and tokens."""
    return Axis(0, end, math.ceil(_round_step(end / TICKS)))


def value_axis(values: list[float], from_zero: bool, linear: bool = False) -> Axis:
    """An axis that begins and ends at ticks and holds all values; by powers of ten where a few
    spikes would flatten everything else, unless it has to be linear."""
    low, high = min(values), max(values)
    if not linear and low > 0 and high > LOGARITHMIC_FROM * statistics.median(values):
        return Axis(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high)), None)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # all the same
        low, high = low - (0 if from_zero else abs(low) / 2), high + (abs(high) or 1) / 2
    step = _round_step((high - low) / TICKS)
    return Axis(math.floor(low / step + 1e-6) * step, math.ceil(high / step - 1e-6) * step, step)


def _round_step(rough: float) -> float:
    """The next of 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(k * power for k in (1, 2, 2.5, 5, 10) if k * power >= 0.999 * rough)


def downsample(points: Points, limit: int) -> Points:
    """About `limit` points: first and last, and the lowest and the highest of each stretch, so that
    no spike is lost and none averaged away."""
    if len(points) <= limit:
        return points
    length = math.ceil(2 * len(points) / limit)
    kept = {0, len(points) - 1}
    for start in range(0, len(points), length):
        stretch = range(start, min(start + length, len(points)))
        present = [i for i in stretch if points[i][1] is not None] or [start]
        kept |= {pick(present, key=lambda i: points[i][1] or 0) for pick in (min, max)}
    return [points[i] for i in sorted(kept)]


def thin(items: list, limit: int) -> list:
    """At most `limit` of the items, evenly spread, first and last among them."""
    if len(items) <= limit:
        return items
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def show(value: float) -> str:
    """A number for people: 0.0012, 2.906, 12,345, and 1.2M from a million on."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.4g}{letter}"
    whole = abs(value) < 1e6 and (value == int(value) or abs(value) >= 1000)
    return f"{value:,.0f}" if whole else f"{value:.4g}"
