"""The picture of a run's losses."""

import json
from pathlib import Path


def read_metrics(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def draw_losses(metrics: Path, picture: Path) -> None:
    """Training and validation loss over steps, from metrics.jsonl to a PNG file."""
    # Takes half a second to load, and only the end of a run needs it. Without pyplot, which would
    # have to be told where to draw, a notebook's own pictures are left alone.
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for key, label, style in (("loss", "training", "-"), ("val_loss", "validation", "o--")):
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4, linewidth=1.5)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)", title=metrics.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture)
