import json
from pathlib import Path

import pytest

from report.picture import draw_losses

BLUE, ORANGE = (0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)  # matplotlib's first two colors


def write_run(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + '{"step": 9, "lo')
    return folder


def drawn(picture: Path, color: tuple) -> int:
    """How many pixels have this color."""
    from matplotlib import image

    pixels = (image.imread(picture)[..., :3] * 255).round()
    return int((pixels == color).all(-1).sum())


@pytest.mark.parametrize(
    ("rows", "has_training", "has_validation"),
    [
        ([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}], True, False),
        ([{"step": 1, "val_loss": 3.0}, {"step": 2, "val_loss": 2.0}], False, True),
        (
            [{"step": s, "loss": None if s == 3 else 1 / s} for s in range(1, 9)]
            + [{"step": 4, "val_loss": 1.0}],
            True,
            True,
        ),
        ([{"step": 1, "loss": float("nan")}], False, False),
    ],
)
def test_the_losses_that_there_are_are_drawn(tmp_path, rows, has_training, has_validation):
    picture = tmp_path / "pictures" / "loss.png"
    draw_losses([write_run(tmp_path / "run", rows)], picture)
    assert (drawn(picture, BLUE) > 50) == has_training
    assert (drawn(picture, ORANGE) > 20) == has_validation
    assert picture.stat().st_size < 100_000


def test_several_runs_have_a_color_each(tmp_path):
    rows = [{"step": 1, "loss": 3.0}, {"step": 9, "loss": 2.0}]
    lower = [{"step": 1, "loss": 2.0}, {"step": 9, "loss": 1.0}]
    runs = [write_run(tmp_path / "a", rows), write_run(tmp_path / "b", lower)]
    draw_losses(runs, tmp_path / "loss.png")
    assert drawn(tmp_path / "loss.png", BLUE) > 50
    assert drawn(tmp_path / "loss.png", ORANGE) > 50
