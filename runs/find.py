"""Finding a run again: by its path, or the newest one."""

import difflib
from collections.abc import Callable
from pathlib import Path

from common.errors import UsageError
from runs.folder import RunFolder, read_settings

RUNS = Path("out/runs")
WHAT = "a run folder, a checkpoint or a folder of weights; 'auto' is the newest run in out/runs"
PRETRAINING = "train_pretrain_accelerate.py"
DISTILLATION = "train_distillation_accelerate.py"
BEST = "@best"  # behind a run: as it was at its lowest validation


def program_of(run: RunFolder) -> str:
    """The training program that made it."""
    return read_settings(run.settings).get("program", PRETRAINING)  # it was the only one once


def newest_run(runs: list[RunFolder], sign: Callable[[RunFolder], Path | None]) -> RunFolder | None:
    """The run whose sign of life, a path that it has written, is the youngest; None if no run has
    one."""
    ages = {run: path.stat().st_mtime for run in runs if (path := sign(run)) and path.exists()}
    return max(ages, key=ages.get, default=None)


def run_to_resume(out: Path, program: str, name: str | None) -> RunFolder | None:
    """What --resume auto goes on with: of this program's runs in a folder, or of the one with this
    name, the run that saved last; None if none has a checkpoint."""
    paths = [out / name] if name else out.glob("*")
    runs = [run for run in map(RunFolder, paths) if program_of(run) == program]
    return newest_run(runs, lambda run: max(run.all_checkpoints(), default=None))


def data_of(name: str) -> str:
    """--data of the run that was named, or that has these weights or this checkpoint; 'auto' as in
    pretraining. Raises UsageError: nothing tells, or it is not there any more."""
    path = Path(name).resolve()
    if not path.exists():
        path = find_run(name.removesuffix(BEST), program=PRETRAINING).resolve()
    for folder in (path, *path.parents[:2]):
        arguments = read_settings(RunFolder(folder).settings).get("arguments")
        data = arguments.get("data") if isinstance(arguments, dict) else None
        if isinstance(data, str) and Path(data).exists():
            return data
    raise UsageError(f"what {name} was trained on is not here: pass --data, prepared text")


def find_run(name: str, runs: Path = RUNS, program: str | None = None) -> Path:
    """The path that was named; for 'auto' the run that was written to last, of this training
    program if one is given. Raises UsageError: there is no such folder; with a guess at which one
    was meant."""
    folders = [path for path in runs.glob("*") if path.is_dir()]
    if name == "auto":
        candidates = [RunFolder(path) for path in folders]
        if program:
            candidates = [run for run in candidates if program_of(run) == program]
        newest = newest_run(candidates, lambda run: run.metrics)
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
