"""The picture of losses: of a run, or of several."""

import math
from pathlib import Path

from training.history import read_history, series


def draw_losses(runs: list[Path], picture: Path) -> None:
    """Training and validation loss over steps, from metrics.jsonl to a PNG or SVG file.

    Raises:
        UsageError: one is no run folder, or has logged nothing yet.
        OSError: the picture cannot be written.
    """
    import matplotlib  # takes half a second to load, and only the end of a run needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    single = len(runs) == 1
    for i, history in enumerate(map(read_history, runs)):
        name = "" if single else f"{history.folder.path.resolve().name}, "
        for j, (label, points, style) in enumerate(
            (
                ("training", series(history.train, "loss"), "-"),
                ("validation", series(history.validation, "val_loss"), "o--"),
            )
        ):
            if points:
                steps, losses = zip(*points, strict=True)
                losses = [math.nan if loss is None else loss for loss in losses]  # gaps
                color = f"C{j if single else i}"
                axes.plot(
                    *(steps, losses, style), color=color, label=name + label, markersize=4, lw=1.5
                )
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.set_title(runs[0].resolve().name if single else None)
    axes.grid(alpha=0.3)
    axes.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
    plt.close(figure)
