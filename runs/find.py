"""Finding a run again: by its path, or the newest one."""

import difflib
from collections.abc import Callable
from pathlib import Path

from common.errors import UsageError
from runs.folder import RunFolder

RUNS = Path("out/runs")
WHAT = "a run folder, a checkpoint or a folder of weights; 'auto' is the newest run in out/runs"
BEST = "@best"  # behind a run: as it was at its lowest validation


def newest_run(runs: list[RunFolder], sign: Callable[[RunFolder], Path | None]) -> RunFolder | None:
    """The run whose sign of life, a path that it has written, is the youngest; None if no run has
    one."""
    ages = {run: path.stat().st_mtime for run in runs if (path := sign(run)) and path.exists()}
    return max(ages, key=ages.get, default=None)


def find_run(name: str, runs: Path = RUNS) -> Path:
    """The path that was named; for 'auto' the run that was written to last. Raises UsageError:
    there is no such folder; with a guess at which one was meant."""
    folders = [path for path in runs.glob("*") if path.is_dir()]
    if name == "auto":
        newest = newest_run([RunFolder(path) for path in folders], lambda run: run.metrics)
        if newest is None:
            where = runs.absolute()
            raise UsageError(f"there is no run in {where} yet: bash run_accelerate.sh makes one")
        return newest.path
    path = Path(name)
    if not path.exists():
        names = {"auto": "auto"} | {folder.name: str(folder) for folder in folders}
        close = difflib.get_close_matches(path.name, names, n=1)
        guess = f": did you mean '{names[close[0]]}'?" if close else ""
        raise UsageError(f"{name}: no such folder{guess}")
    if not path.is_dir():
        raise UsageError(f"{name} is a file: give {WHAT}")
    return path
