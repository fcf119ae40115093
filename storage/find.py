"""Find a run by its path, or find the newest run."""

from collections.abc import Callable, Iterable
from pathlib import Path

from common.errors import UsageError
from storage.folder import RunFolder, read_settings

RUNS = Path("out/runs")
PRETRAINING = "train_pretrain_accelerate.py"
DISTILLATION = "train_distillation_accelerate.py"
BEST = "@best"  # RUN@best is the checkpoint of RUN with the lowest validation loss


def newest_run(paths: Iterable[Path], program: str | None, sign: Callable) -> RunFolder | None:
    """Return the run of this training program that was written to last, or None.
    A run was written to when the path that `sign` returns for it was modified."""
    times = {}
    for run in map(RunFolder, paths):
        path = sign(run)
        if path and path.exists() and program in (None, program_of(run)):
            times[run] = path.stat().st_mtime
    return max(times, key=times.get, default=None)


def program_of(run: RunFolder) -> str:
    """Return the training program of a run. Settings of older runs name no program."""
    return read_settings(run.settings).get("program", PRETRAINING)


def run_to_resume(out: Path, program: str, name: str | None) -> RunFolder | None:
    """Return the run `out`/`name`; without name, the one that saved last. None: no checkpoint."""
    paths = [out / name] if name else out.glob("*")
    return newest_run(paths, program, lambda run: max(run.all_checkpoints(), default=None))


def data_of(name: str) -> str:
    """Return the data folder of a run, or of a checkpoint or weights in a run; 'auto' is the newest
    pretraining run. Raises UsageError: the run names no data, or the data is gone."""
    path = Path(name).resolve()
    if not path.exists():
        path = find_run(name.removesuffix(BEST), program=PRETRAINING).resolve()
    for folder in (path, *path.parents[:2]):
        data = read_settings(RunFolder(folder).settings).get("arguments", {}).get("data")
        if data and Path(data).exists():
            return data
    raise UsageError(f"the training data of {name} was not found: pass --data FOLDER")


def find_run(name: str, runs: Path = RUNS, program: str | None = None) -> Path:
    """Return the folder with this name; 'auto' is the run of this program that logged last.
    Raises UsageError: there is no such folder."""
    if name == "auto":
        newest = newest_run(runs.glob("*"), program, lambda run: run.metrics)
        if newest is None:
            where = runs.absolute()
            raise UsageError(f"there is no run in {where} yet: start one, bash run_accelerate.sh")
        return newest.path
    if not Path(name).is_dir():
        raise UsageError(f"{name}: no such folder")
    return Path(name)
