"""Reading what a run has logged so far, also of a run under way or a killed one."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.errors import UsageError
from storage.folder import RunFolder, read_settings


@dataclass
class History:
    """Rows of the files in the order of steps; where a step comes twice, the last one."""

    folder: RunFolder
    settings: dict  # empty if there is no readable settings.json
    train: list[dict]
    validation: list[dict]
    samples: list[dict]

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of all processes per step; None if no row tells."""
        tokens = [row["tokens"] / row["step"] for row in self.train if row.get("tokens")]
        return tokens[0] if tokens else None


def read_history(path: Path) -> History:
    """Read a run folder. Raises UsageError: it is none, or nothing has been logged yet."""
    folder = RunFolder(path)
    if not folder.metrics.exists():
        raise UsageError(f"{path} has no {folder.metrics.name}: it is not the folder of a run")
    train, validation = {}, {}  # step → row
    for row in read_rows(folder.metrics):
        if "forward_seconds" not in row:  # a profiled step, which also has a row of its own
            (validation if "val_loss" in row else train)[row["step"]] = row
    if not (train or validation):
        raise UsageError(f"{folder.metrics} is empty: the run has not logged a step yet")
    samples = {row["step"]: row for row in read_rows(folder.samples) if "text" in row}
    ordered = ([kind[step] for step in sorted(kind)] for kind in (train, validation, samples))
    return History(folder, read_settings(folder.settings), *ordered)


def read_rows(path: Path) -> list[dict]:
    """Return the whole JSON lines of a file that have a step; none if there is no file."""
    rows = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            if number(row["step"]) is not None:
                rows.append(row)
    return rows


def number(value) -> float | None:
    """Return the value if it is a finite number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def series(rows: list[dict], key: str) -> list[tuple[float, float | None]]:
    """Return (step, value) of the rows that have the key; None for a value that is not finite."""
    return [(row["step"], number(row[key])) for row in rows if key in row]
