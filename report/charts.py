"""Charts of losses and other numbers over steps, drawn by matplotlib."""

import io
import re
from dataclasses import dataclass, field
from html import escape

import numpy as np

DOTS_UP_TO = 40  # points of a curve
COLORS = ("#1f5fbf", "#c2540a", "#1b7f46", "#8a3fc0", "#b8215c", "#0b7285", "#7d5a00", "#555b66")
INK, RULE = "#5a5f68", "#dcdcd6"
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "path.simplify_threshold": 0.5,  # in points: spikes stay, thousands of points between them go
    "font.family": "DejaVu Sans",  # measured with it; the page shows its own font
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), RULE),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
    "axes.axisbelow": True,
}


@dataclass
class Curve:
    label: str
    points: list[tuple[float, float | None]]  # (step, value); None is a gap in the line
    color: int
    tokens_per_step: float | None  # of its run; None where nothing tells

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points if value is not None]


@dataclass
class Chart:
    title: str
    unit: str
    key: str  # its name in metrics.jsonl
    from_zero: bool = True  # whether the axis of values has to begin there
    curves: list[Curve] = field(default_factory=list)
    size: tuple[float, float] = (5.5, 2.3)  # in inches, before the page scales it


def plot(chart: Chart):
    """Return a matplotlib Figure: over steps, or over tokens if runs take steps of other sizes."""
    from matplotlib.figure import Figure  # takes most of a second to load

    figure = Figure(chart.size, layout="constrained")
    axes = figure.add_subplot()
    sizes = {curve.tokens_per_step for curve in chart.curves}
    over_tokens = len(sizes) > 1 and None not in sizes
    for curve in chart.curves:
        steps, values = np.array(curve.points, float).T  # a gap is NaN
        axes.plot(
            steps * (curve.tokens_per_step if over_tokens else 1),
            values,
            color=COLORS[curve.color % len(COLORS)],
            label=f"{curve.label} {show(curve.values[-1])}",
            marker="o" if len(values) <= DOTS_UP_TO else None,
            markersize=3.5,
            clip_on=False,
        )
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    axes.margins(x=0)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("tokens" if over_tokens else "steps")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: show(value, digits=6))
    return figure


def draw(chart: Chart) -> str:
    """Return the chart as an HTML figure."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context(STYLE):
        plot(chart).savefig(out, format="svg", transparent=True, metadata={"Date": None})
    drawn = re.sub(r'<g id="[^"]*">', "<g>", out.getvalue().partition("<defs")[2])
    drawn = re.sub(r"(\.\d)\d+(?=[ \n\")])", r"\1", drawn)  # coordinates to a tenth of a point
    box = f"0 0 {72 * chart.size[0]:g} {72 * chart.size[1]:g}"
    legend = "".join(
        f'<li style="--color: {COLORS[curve.color % len(COLORS)]}">'
        f"<span>{escape(curve.label)}</span> <b>{show(curve.values[-1])}</b></li>"
        for curve in chart.curves
    )
    return (
        f"<figure><figcaption><h2>{escape(chart.title)}</h2> <small>{escape(chart.unit)}</small>"
        f'</figcaption>\n<ul>{legend}</ul>\n<div><svg viewBox="{box}" role="img" '
        f'aria-label="{escape(chart.title)}"><defs{drawn}</div>\n</figure>'
    )


def show(value: float, digits: int = 4) -> str:
    """Format a number for people: 0.0012, 2.906, 12,345, and 1.2M from a million on."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.{digits}g}{letter}"
    whole = abs(value) < 1e6 and (value == int(value) or abs(value) >= 10 ** (digits - 1))
    return f"{value:,.0f}" if whole else f"{value:.{digits}g}"
