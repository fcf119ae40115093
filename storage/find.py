"""Finding a run again: by its path, or the newest one."""

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path

from common.errors import UsageError
from storage.folder import RunFolder, read_settings

RUNS = Path("out/runs")
PRETRAINING = "train_pretrain_accelerate.py"
DISTILLATION = "train_distillation_accelerate.py"
BEST = "@best"  # behind a run: as it was at its lowest validation


def newest_run(
    paths: Iterable[Path], program: str | None, sign: Callable[[RunFolder], Path | None]
) -> RunFolder | None:
    """Return the run of this program whose sign of life, a path that it writes, is the youngest."""
    ages = {}
    for run in map(RunFolder, paths):
        path = sign(run)
        if path and path.exists() and program in (None, program_of(run)):
            ages[run] = path.stat().st_mtime
    return max(ages, key=ages.get, default=None)


def program_of(run: RunFolder) -> str:
    """Return the training program that made a run; old settings name none."""
    return read_settings(run.settings).get("program", PRETRAINING)


def run_to_resume(out: Path, program: str, name: str | None) -> RunFolder | None:
    """Return the run of this program in `out` that saved last, or the one with this name."""
    paths = [out / name] if name else out.glob("*")
    return newest_run(paths, program, lambda run: max(run.all_checkpoints(), default=None))


def data_of(name: str) -> str:
    """Return --data of a run, or of the run of these weights or this checkpoint; 'auto' is the
    newest pretraining run. Raises UsageError: the data is unknown or gone."""
    path = Path(name).resolve()
    if not path.exists():
        path = find_run(name.removesuffix(BEST), program=PRETRAINING).resolve()
    for folder in (path, *path.parents[:2]):
        data = read_settings(RunFolder(folder).settings).get("arguments", {}).get("data")
        if data and Path(data).exists():
            return data
    raise UsageError(f"what {name} was trained on is not here: pass --data, prepared text")


def find_run(name: str, runs: Path = RUNS, program: str | None = None) -> Path:
    """Return the folder that was named; 'auto' is the run, of this program, written to last. Raises
    UsageError: there is no such folder; names one that is spelled like it."""
    if name == "auto":
        if newest := newest_run(runs.glob("*"), program, lambda run: run.metrics):
            return newest.path
        where = runs.absolute()
        raise UsageError(f"there is no run in {where} yet: bash run_accelerate.sh makes one")
    if not Path(name).is_dir():
        names = {"auto": "auto"} | {path.name: str(path) for path in runs.glob("*")}
        close = difflib.get_close_matches(Path(name).name, names, n=1)
        guess = f": did you mean '{names[close[0]]}'?" if close else ""
        raise UsageError(f"{name}: no such folder{guess}")
    return Path(name)
