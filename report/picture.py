"""The picture of losses: of a run, or of several."""

from pathlib import Path

import numpy as np

from report.history import read_history
from report.page import LOSS, VAL_LOSS, by_name, curves_of


def draw_losses(runs: list[Path], picture: Path) -> None:
    """Draw training and validation loss over steps, from metrics.jsonl to a PNG or SVG file.

    Raises UsageError: one is no run folder, or has logged nothing yet. OSError: the picture cannot
    be written.
    """
    # Imported here, for it takes half a second. Without pyplot a notebook's pictures stay alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="loss (nats per token)")
    histories = by_name([read_history(run) for run in runs])
    single = len(histories) == 1
    for i, (label, chart) in enumerate((("training", LOSS), ("validation", VAL_LOSS))):
        for curve in curves_of(chart, histories):
            steps, losses = np.array(curve.points, float).T  # a gap is NaN
            name = label if single else f"{curve.label}, {label}"
            look = {"color": f"C{i if single else curve.color}", "markersize": 4, "linewidth": 1.5}
            text = f"{name} {curve.values[-1]:.3f}"
            axes.plot(steps, losses, "o--" if i else "-", label=text, **look)
    axes.set_title(*histories if single else [""])
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
