"""Draw charts of losses and other numbers over steps, with matplotlib."""

import io
import os
import re
from dataclasses import dataclass
from html import escape
from itertools import cycle
from types import ModuleType

import numpy as np

DOTS_UP_TO = 40  # a curve with at most this many points has a dot at each point
COLORS = ("#1f5fbf", "#c2540a", "#1b7f46", "#8a3fc0", "#b8215c", "#0b7285", "#7d5a00", "#555b66")
STYLE = {"svg.fonttype": "none", "font.size": 9}  # write text as text, not as outlines


@dataclass
class Curve:
    """One line of a chart."""

    label: str  # name in the legend
    points: list[tuple[float, float | None]]  # (step, value); None is a gap in the line
    tokens_per_step: float | None  # tokens per optimizer step of the run; None: unknown

    @property
    def values(self) -> list[float]:
        """The values of the points that are not gaps."""
        return [value for _, value in self.points if value is not None]


@dataclass
class Chart:
    """A chart of one number of metrics.jsonl, or of the training and the validation loss."""

    title: str
    unit: str  # shown next to the title
    key: str  # name of the number in metrics.jsonl
    from_zero: bool = True  # start the vertical axis at 0
    size: tuple[float, float] = (5.5, 2.3)  # width and height in inches; the page scales them
    curves: tuple[Curve, ...] = ()  # in the order of the colors

    def lines(self) -> list[tuple[str, Curve]]:
        """Return (color, curve) of each curve that has values."""
        colored = zip(cycle(COLORS), self.curves, strict=False)
        return [(color, curve) for color, curve in colored if curve.values]


def load_matplotlib() -> ModuleType:
    """Import matplotlib, which takes most of a second. Its import fails if MPLBACKEND is a wrong
    name, or if the user has no home. Files need neither."""
    if not os.environ.get("MPLBACKEND", "").startswith("module://"):  # the import accepts a module
        os.environ.pop("MPLBACKEND", None)
    if os.path.expanduser("~") == "~":
        os.environ["HOME"] = "/"  # where it cannot write, it makes a temporary folder
    import matplotlib.figure

    return matplotlib


def plot(chart: Chart):
    """Return a Figure over steps; over tokens if the runs' tokens per step are known and differ."""
    figure = load_matplotlib().figure.Figure(chart.size, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right", "left"]].set_visible(False)
    sizes = {curve.tokens_per_step for _, curve in chart.lines()}
    over_tokens = len(sizes) > 1 and None not in sizes
    for color, curve in chart.lines():
        x, values = np.array(curve.points, float).T  # a gap becomes NaN
        if over_tokens:
            x = x * curve.tokens_per_step
        axes.plot(
            x,
            values,
            color=color,
            label=f"{curve.label} {show(curve.values[-1])}",
            marker="o" if len(values) <= DOTS_UP_TO else None,
            markersize=3.5,
            clip_on=False,
        )
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dcdcd6")
    axes.margins(x=0)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("tokens" if over_tokens else "steps")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: show(value, digits=6))
    return figure


def draw(chart: Chart) -> str:
    """Return the chart as an HTML <figure> with an SVG picture."""
    out = io.StringIO()
    with load_matplotlib().rc_context(STYLE):
        plot(chart).savefig(out, format="svg", transparent=True, metadata={"Date": None})
    drawn = out.getvalue().partition("<defs")[2]
    drawn = re.sub(r'<g id="[^"]*">', "<g>", drawn)  # ids must be unique on the page
    drawn = re.sub(r"(\.\d)\d+(?=[ \n\")])", r"\1", drawn)  # coordinates to a tenth of a point
    box = f"0 0 {72 * chart.size[0]:g} {72 * chart.size[1]:g}"  # 72 points per inch
    legend = "".join(
        f'<li style="--color: {color}"><span>{escape(curve.label)}</span> '
        f"<b>{show(curve.values[-1])}</b></li>"
        for color, curve in chart.lines()
    )
    return (
        f"<figure><figcaption><h2>{escape(chart.title)}</h2> <small>{escape(chart.unit)}</small>"
        f'</figcaption>\n<ul>{legend}</ul>\n<div><svg viewBox="{box}" role="img" '
        f'aria-label="{escape(chart.title)}"><defs{drawn}</div>\n</figure>'
    )


def show(value: float, digits: int = 4) -> str:
    """Format a number, such as 0.0012, 2.906, 12,345 or 1.2M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.{digits}g}{letter}"
    whole = abs(value) < 1e6 and (value == int(value) or abs(value) >= 10 ** (digits - 1))
    return f"{value:,.0f}" if whole else f"{value:.{digits}g}"
