"""Charts as SVG in HTML: the page may stretch them to any width, and their text stays as it is.

A plot is a square of 1000 × 1000 units that the page stretches; strokes keep their width
(`vector-effect: non-scaling-stroke`), and the labels of the axes are HTML placed by percentages. A
chart can be read over steps and over tokens: within a run, tokens are steps times a constant, so
the page only scales each curve by another factor and shows other labels.
"""

import json
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from report.axes import Axis, Points, count_axis, downsample, show, thin, value_axis

SIZE = 1000
DOTS_UP_TO = 40  # points of a curve
BARS = 60  # at most
COLORS = 8  # in the page's palette


@dataclass
class Curve:
    """A line of a chart, or the part of its bars that has one color."""

    label: str
    points: Points  # not all without a value
    color: int
    tokens_per_step: float | None  # of its run; None where nothing tells

    @property
    def known(self) -> list[tuple[float, float]]:
        """The points that have a value."""
        return [(step, value) for step, value in self.points if value is not None]

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.known]

    @property
    def style(self) -> str:
        return f"--color: var(--color-{self.color % COLORS})"


@dataclass
class Chart:
    title: str
    unit: str
    curves: list[Curve]
    from_zero: bool = True  # whether the axis of values has to begin there
    bars: bool = False  # one curve's on another's; all have the same steps
    limit: int = 800  # points of a curve


@dataclass
class Extent:
    """How far the horizontal axis goes."""

    step: float
    token: float | None  # None: not known of every curve, and there is no axis of tokens

    def stretch(self, curve: Curve) -> float:
        """Width over tokens by width over steps."""
        return curve.tokens_per_step * self.step / self.token if self.token else 1.0


def draw(chart: Chart) -> str:
    """The chart as an HTML figure: complete as it is; `data-chart` is for the page's read-out.

    Curves of more than `limit` points are thinned out, their spikes kept; of more than BARS bars
    evenly spread ones are shown, and the figure says so.
    """
    full = chart.curves
    shrink = (lambda p: thin(p, BARS)) if chart.bars else (lambda p: downsample(p, chart.limit))
    curves = [Curve(c.label, shrink(c.points), c.color, c.tokens_per_step) for c in full]
    extent = _extent(curves, chart.bars)
    if chart.bars:
        columns = zip(*(curve.points for curve in curves), strict=True)
        sums = [sum(value or 0 for _, value in column) for column in columns]
        axis = value_axis(sums, from_zero=True, linear=True)
        marks = _bars(curves, extent, axis)
    else:
        axis = value_axis([v for curve in full for v in curve.values], chart.from_zero)
        marks = "".join(_line(curve, extent, axis) for curve in curves)
    notes = [chart.unit] + ["logarithmic"] * axis.logarithmic
    number, shown = (max(len(curve.points) for curve in some) for some in (full, curves))
    if shown < number:
        spikes = "" if chart.bars else ", all spikes among them"
        notes.append(f"{shown:,} of {number:,} points{spikes}")
    legend = "".join(
        f'<li style="{c.style}"><span>{escape(c.label)}</span> <b>{show(c.values[-1])}</b></li>'
        for c in full
    )
    grid = "".join(f'<path class="grid" d="M0 {_y(at, axis)}H{SIZE}"/>' for at, _ in axis.ticks())
    return (
        f'<figure data-chart="{escape(json.dumps(_read_out(curves, extent)))}">\n'
        f"<figcaption><h2>{escape(chart.title)}</h2> <small>{escape(', '.join(notes))}</small>"
        f"<output></output></figcaption>\n<ul>{legend}</ul>\n"
        f'<div class="plot" role="img" tabindex="0" aria-label="{escape(_summary(chart))}">\n'
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" aria-hidden="true">'
        f"{grid}{marks}</svg>\n{_labels(extent, axis)}\n</div>\n</figure>"
    )


def _extent(curves: list[Curve], bars: bool) -> Extent:
    last = max(curve.points[-1][0] for curve in curves)
    margin = _gap(curves[0].points) / 2 if bars else 0.0  # the last bar is centred on its step
    step = max(last, 1) + margin
    if not all(curve.tokens_per_step for curve in curves):
        return Extent(step, None)
    token = max(curve.tokens_per_step * curve.points[-1][0] for curve in curves)
    return Extent(step, token * step / max(last, 1))


def _gap(points: Points) -> float:
    """The smallest distance between two steps."""
    steps = [step for step, _ in points]
    return min((b - a for a, b in pairwise(steps)), default=max(steps[0], 1))


def _x(step: float, extent: Extent) -> int:
    return round(SIZE * step / extent.step)


def _y(value: float, axis: Axis) -> int:
    return round(SIZE * (1 - axis.share(value)))


def _line(curve: Curve, extent: Extent, axis: Axis) -> str:
    """The curve's line, and dots where its points are few; a point between gaps is a dot too."""
    line, dots = [], []
    values = [None, *(value for _, value in curve.points), None]
    for before, (step, value), after in zip(values, curve.points, values[2:], strict=False):
        if value is None:
            continue
        at = f"{_x(step, extent)} {_y(value, axis)}"
        line.append(f"{'M' if before is None else 'L'}{at}")
        if before is after is None or len(curve.points) <= DOTS_UP_TO:
            dots.append(f"M{at}h0")
    look = f'style="{curve.style}; --stretch: {extent.stretch(curve):.6g}"'
    drawn = f'<path class="line" {look} d="{"".join(line)}"/>'
    return drawn + (f'<path class="dots" {look} d="{"".join(dots)}"/>' if dots else "")


def _bars(curves: list[Curve], extent: Extent, axis: Axis) -> str:
    width = max(round(0.7 * SIZE * _gap(curves[0].points) / extent.step), 2)
    below = [0.0] * len(curves[0].points)
    drawn = []
    for curve in curves:
        path = []
        for i, (step, value) in enumerate(curve.points):
            left, foot = _x(step, extent) - width // 2, _y(below[i], axis)
            below[i] += value or 0.0
            height = foot - _y(below[i], axis)
            path.append(f"M{left} {foot}h{width}v-{height}h-{width}z")
        drawn.append(f'<path class="bars" style="{curve.style}" d="{"".join(path)}"/>')
    return "".join(drawn)


def _labels(extent: Extent, values: Axis) -> str:
    labels = [
        f'<span class="y" style="bottom: {100 * values.share(value):.4g}%">{text}</span>'
        for value, text in values.ticks()
    ]
    for name, end in (("steps", extent.step), ("tokens", extent.token)):
        if end is None:
            continue
        css = f"x {name}" if extent.token else "x"  # without tokens, steps are always shown
        labels += [
            f'<span class="{css}" style="left: {100 * at / end:.4g}%">{show(at)}</span>'
            for at, _ in count_axis(end).ticks()
        ]
        labels.append(f'<span class="{css} name">{name}</span>')
    return "".join(labels)


def _read_out(curves: list[Curve], extent: Extent) -> dict:
    """What the page's script finds values in: the ends of the axes, and x and y of each curve."""
    series = [
        {
            "tokens": curve.tokens_per_step,
            "x": [step for step, _ in curve.known],
            "y": [float(f"{value:.5g}") for value in curve.values],
        }
        for curve in curves
    ]
    return {"step": extent.step, "token": extent.token, "series": series}


def _summary(chart: Chart) -> str:
    """The chart in words, for who does not see it."""
    ends = []
    for curve in chart.curves:
        first, last = (f"{show(y)} at step {x:,}" for x, y in (curve.known[0], curve.known[-1]))
        ends.append(f"{curve.label} from {first} to {last}")
    return f"{chart.title} ({chart.unit}): {'; '.join(ends)}"
