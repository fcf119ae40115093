"""Reading what a run has logged so far, also of a run under way or a killed one."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from common.errors import UsageError
from runs.folder import RunFolder, read_settings


@dataclass
class History:
    """Rows as in the files, in the order of steps, the last one where a step comes twice."""

    folder: RunFolder
    settings: dict  # empty if there is no readable settings.json
    train: list[dict]
    validation: list[dict]
    profile: list[dict]
    samples: list[dict]

    @property
    def last_step(self) -> int:
        """The newest step that any row tells of."""
        return max(rows[-1]["step"] for rows in (self.train, self.validation, self.profile) if rows)

    @property
    def phases(self) -> list[str]:
        """Names of the phases of a profiled step, in their order."""
        names = [key for row in self.profile[:1] for key in row if key.endswith("_seconds")]
        return [name.removesuffix("_seconds") for name in names if name != "step_seconds"]

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of all processes per step, the same throughout a run; None if no row tells."""
        for row in self.train:
            if number(row.get("tokens")) and row["step"] > 0:
                return row["tokens"] / row["step"]
        return None


def read_history(path: Path) -> History:
    """Read the history of a run folder. Raises UsageError: it is no run folder, or nothing has been
    logged yet."""
    folder = RunFolder(path)
    if not folder.metrics.exists():
        raise UsageError(f"{path} has no {folder.metrics.name}: it is not the folder of a run")
    rows = read_rows(folder.metrics)
    if not rows:
        raise UsageError(f"{folder.metrics} is empty: the run has not logged a step yet")
    train, validation, profile = {}, {}, {}  # step → row
    for row in rows:
        kind = validation if "val_loss" in row else profile if "forward_seconds" in row else train
        kind[row["step"]] = row
    samples = {row["step"]: row for row in read_rows(folder.samples) if "text" in row}
    kinds = (train, validation, profile, samples)
    ordered = ([kind[step] for step in sorted(kind)] for kind in kinds)
    return History(folder, read_settings(folder.settings), *ordered)


def read_rows(path: Path) -> list[dict]:
    """Return the JSON lines of a file that have a step; none if there is no file.

    A line that is being written, or was cut short by a kill, is left out.
    """
    rows = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            row = json.loads(line)
            if number(row["step"]) is not None:
                rows.append(row)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return rows


def number(value) -> float | None:
    """Return the value if it is a finite number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def series(rows: list[dict], key: str) -> list[tuple[float, float | None]]:
    """Return (step, value) of the rows that have the key; None for a value that is not finite."""
    return [(row["step"], number(row[key])) for row in rows if key in row]
