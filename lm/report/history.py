"""Read the metrics and samples of a run, which may be in progress."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lm.common.errors import UsageError
from lm.storage.folder import RunFolder, read_settings


@dataclass
class History:
    """The rows that a run has logged. Each list has at most one row per step, in order."""

    folder: RunFolder
    settings: dict  # empty if there is no readable settings.json
    train: list[dict]  # rows of metrics.jsonl with a training loss
    validation: list[dict]  # rows of metrics.jsonl with "val_loss"
    samples: list[dict]  # rows of samples.jsonl

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per optimizer step of all processes; None if unknown."""
        tokens = [row["tokens"] / row["step"] for row in self.train if row.get("tokens")]
        return tokens[0] if tokens else None

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
    train, validation = {}, {}  # step → its last row
    for row in read_rows(folder.metrics):
        if "val_loss" in row:
            validation[row["step"]] = row
        elif "forward_seconds" not in row:  # only the profiler's rows have this key
            train[row["step"]] = row
    if not (train or validation):
        raise UsageError(f"{folder.metrics}: the run has not logged a step yet")
    samples = {row["step"]: row for row in read_rows(folder.samples) if "text" in row}
    in_order = ([rows[step] for step in sorted(rows)] for rows in (train, validation, samples))
    return History(folder, read_settings(folder.settings), *in_order)


def read_rows(path: Path) -> list[dict]:
    """Return the JSON lines of a file that have a step; return [] if there is no file."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError, KeyError, TypeError):  # a killed run leaves half a line
            row = json.loads(line)
            if number(row["step"]) is not None:
                rows.append(row)
    return rows


def number(value) -> float | None:
    """Return the value if it is a finite number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def series(rows: list[dict], key: str) -> list[tuple[float, float | None]]:
    """Return (step, value) of the rows that have the key. A value that is not finite is None."""
    return [(row["step"], number(row[key])) for row in rows if key in row]
