"""The picture of losses: of a run, or of several."""

import math
from pathlib import Path

from report.history import read_history, series


def draw_losses(runs: list[Path], picture: Path) -> None:
    """Training and validation loss over steps, from metrics.jsonl to a PNG or SVG file.

    Raises UsageError: one is no run folder, or has logged nothing yet. OSError: the picture cannot
    be written.
    """
    # Takes half a second to load, and only the end of a run needs it. Without pyplot, which would
    # have to be told where to draw, a notebook's own pictures are left alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120)
    axes = figure.add_axes((0.08, 0.12, 0.9, 0.8))  # left, bottom, width, height
    single = len(runs) == 1
    for i, history in enumerate(map(read_history, runs)):
        name = "" if single else f"{history.folder.path.resolve().name}, "
        losses = {"training": history.train, "validation": history.validation}
        for j, (label, rows) in enumerate(losses.items()):
            points = series(rows, "val_loss" if j else "loss")
            known = [loss for _, loss in points if loss is not None]
            if known:
                steps, values = zip(*points, strict=True)
                values = [math.nan if value is None else value for value in values]  # gaps
                look = {"color": f"C{j if single else i}", "markersize": 4, "linewidth": 1.5}
                text = f"{name}{label} {known[-1]:.3f}"
                axes.plot(steps, values, "o--" if j else "-", label=text, **look)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.set_title(runs[0].resolve().name if single else "")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
