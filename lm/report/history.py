"""Read the metrics and samples of a run, which may be in progress."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lm.common.errors import UsageError
from lm.storage.folder import RunFolder, read_settings


@dataclass
class History:
    """The rows that a run has logged, in the order of the steps."""

    folder: RunFolder
    settings: dict  # empty if there is no readable settings.json
    train: list[dict]  # rows of metrics.jsonl with "loss"
    validation: list[dict]  # rows of metrics.jsonl with "val_loss"
    samples: list[dict]  # rows of samples.jsonl

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per optimizer step of all processes; None if unknown."""
        return next((row["tokens"] / row["step"] for row in self.train if row.get("tokens")), None)

    @property
    def training_loss_is(self) -> str:
        """Why the training loss cannot be compared with the validation loss; may be empty."""
        flags = self.settings.get("arguments") or {}
        reasons = []
        if flags.get("sampled_softmax", 1) > 1:
            reasons.append("estimate over a part of the vocabulary")
        if flags.get("token_noise", 0) > 0:
            reasons.append("with noise in the input")
        return f" ({', '.join(reasons)})" if reasons else ""


def read_history(path: Path) -> History:
    """Read a run. Raises UsageError if `path` is not a run or has no logged step."""
    folder = RunFolder(path)
    if not folder.metrics.exists():
        raise UsageError(f"{path} has no {folder.metrics.name}: it is not the folder of a run")
    rows = read_rows(folder.metrics)
    train, validation = ([row for row in rows if key in row] for key in ("loss", "val_loss"))
    if not (train or validation):
        raise UsageError(f"{folder.metrics}: the run has not logged a step yet")
    return History(
        folder, read_settings(folder.settings), train, validation, read_rows(folder.samples)
    )


def read_rows(path: Path) -> list[dict]:
    """Return the JSON lines of a file; return [] if there is no file."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError):  # a killed run leaves half a line
            rows.append(json.loads(line))
    return rows
