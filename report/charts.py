"""Charts of the page: matplotlib draws them as SVG, and the page's style colors them."""

import io
import re
import statistics
from dataclasses import dataclass, field
from html import escape

import numpy as np

DOTS_UP_TO = 40  # points of a curve
COLORS = 8  # in the page's palette
LOGARITHMIC_FROM = 20  # largest value over the median: a linear axis would show a flat line
# Stand-ins for the colors that the page gives to text, rules and curves, in light and in dark.
INK, RULE, CURVE = "#00ff00", "#00ff01", "#00fff{}"
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "path.simplify_threshold": 0.5,  # in points: spikes stay, thousands of points between them go
    "font.family": "DejaVu Sans",  # measured with it; shown in the page's font
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), RULE),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
    "ytick.left": False,
    "axes.axisbelow": True,
}

Points = list[tuple[float, float | None]]  # (step, value); None is a gap in the line


@dataclass
class Curve:
    """A line of a chart."""

    label: str
    points: Points  # not all without a value
    color: int
    tokens_per_step: float | None  # of its run; None where nothing tells

    @property
    def values(self) -> list[float]:
        """The values that there are."""
        return [value for _, value in self.points if value is not None]


@dataclass
class Chart:
    title: str
    unit: str
    rows: str = ""  # which rows of a History have its values
    key: str = ""  # and under which name
    factor: float = 1.0  # from the rows' unit to that of the chart
    from_zero: bool = True  # whether the axis of values has to begin there
    curves: list[Curve] = field(default_factory=list)
    size: tuple[float, float] = (5.5, 2.3)  # in inches, before the page scales it


def draw(chart: Chart) -> str:
    """Return the chart as an HTML figure: over steps, and over tokens where they are known."""
    legend = "".join(
        f'<li style="--color: var(--color-{curve.color % COLORS})">'
        f"<span>{escape(curve.label)}</span> <b>{show(curve.values[-1])}</b></li>"
        for curve in chart.curves
    )
    plots = f'<div class="steps">{svg(chart)}</div>'
    if all(curve.tokens_per_step for curve in chart.curves):
        plots = f'<div class="tokens">{svg(chart, over_tokens=True)}</div>{plots}'
    return (
        f"<figure><figcaption><h2>{escape(chart.title)}</h2> <small>{escape(chart.unit)}</small>"
        f"</figcaption>\n<ul>{legend}</ul>\n{plots}\n</figure>"
    )


def svg(chart: Chart, over_tokens: bool = False) -> str:
    """Return the chart as SVG to stand in HTML."""
    from matplotlib import rc_context  # takes most of a second to load
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(chart.size, facecolor="none", layout="constrained")
        axes = figure.add_subplot(facecolor="none")
        axes.grid(axis="y")
        for curve in chart.curves:
            steps, values = np.array(curve.points, float).T  # a gap is NaN
            scale = curve.tokens_per_step if over_tokens else 1
            look = {"linewidth": 1.4, "marker": "o", "markersize": 3.5, "clip_on": False}
            color = CURVE.format(curve.color % COLORS)
            axes.plot(steps * scale, values, color=color, markevery=dotted(values), **look)
        values = [value for curve in chart.curves for value in curve.values]
        if min(values) > 0 and max(values) > LOGARITHMIC_FROM * statistics.median(values):
            axes.set_yscale("log")
        elif chart.from_zero:
            axes.set_ylim(0, 1.05 * max(values) or 1)
        axes.margins(x=0)
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("tokens" if over_tokens else "steps")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: show(value, digits=6))
        out = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=metadata)
    label = escape(f"{chart.title} ({chart.unit})")
    drawn = re.sub(r'<g id="[^"]*">', "<g>", out.getvalue().partition("<svg")[2].partition(">")[2])
    # A tenth of a point is fine enough for coordinates. Behind the numbers of a text comes "<".
    drawn = re.sub(r"(\.\d)\d+(?=[ \n\")])", r"\1", drawn)
    drawn = re.sub(CURVE.format(r"(\d)"), r"var(--color-\1)", drawn)
    drawn = drawn.replace(INK, "var(--quiet)").replace(RULE, "var(--rule)")
    width, height = (72 * inches for inches in chart.size)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{label}">{drawn}'


def dotted(values: np.ndarray) -> np.ndarray:
    """Return the indices of the points that become dots: all where they are few, else those between
    gaps, which a line would not show."""
    known = np.isfinite(values)
    beside = np.pad(known, 1)
    return np.flatnonzero(known & (len(values) <= DOTS_UP_TO) | known & ~beside[:-2] & ~beside[2:])


def thin(items: list, limit: int) -> list:
    """Return at most `limit` of the items, evenly spread, first and last among them."""
    if len(items) <= limit:
        return items
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def show(value: float, digits: int = 4) -> str:
    """Format a number for people: 0.0012, 2.906, 12,345, and 1.2M from a million on."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.{digits}g}{letter}"
    whole = abs(value) < 1e6 and (value == int(value) or abs(value) >= 10 ** (digits - 1))
    return f"{value:,.0f}" if whole else f"{value:.{digits}g}"
