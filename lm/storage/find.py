"""Find a run by its path, or find the newest run."""

from collections.abc import Callable, Iterable
from pathlib import Path

from lm.common.errors import UsageError
from lm.storage.folder import RunFolder, read_settings

RUNS = Path("out/runs")
PRETRAINING = "train_pretrain_accelerate.py"
DISTILLATION = "train_distillation_accelerate.py"
BEST = "@best"  # RUN@best is the checkpoint of RUN with the lowest validation loss


def newest_first(paths: Iterable[Path], program: str | None, path_in: Callable) -> list[RunFolder]:
    """Return the runs of `program` (None: of all programs) among `paths`, the newest first.
    The newest run was started or resumed last, as its settings say: copying a run changes the times
    of its files. If they do not say it (older runs), the time of the file or folder `path_in(run)`
    counts. Runs without this path are left out."""
    times = {}
    for run in map(RunFolder, paths):
        path = path_in(run)
        if path and path.exists() and program in (None, program_of(run)):
            written = path.stat().st_mtime
            times[run] = read_settings(run.settings).get("started", written), written
    return sorted(times, key=times.get, reverse=True)


def program_of(run: RunFolder) -> str:
    """Return the training program of a run; PRETRAINING if its settings name none (older runs)."""
    return read_settings(run.settings).get("program", PRETRAINING)


def run_to_resume(out: Path, program: str, name: str | None) -> RunFolder | None:
    """Return the run `name` of `program` in the folder `out`; without a name, the newest run of
    `program` in `out` that has a checkpoint. Return None if no such run has a checkpoint."""
    paths = [out / name] if name else out.glob("*")
    runs = newest_first(paths, program, lambda run: max(run.all_checkpoints(), default=None))
    return runs[0] if runs else None


def data_of(name: str) -> str:
    """Return the data folder of a run. `name` is the run, RUN@best, a checkpoint or weights of
    the run, or 'auto' (newest pretraining run). Raises UsageError if run or data is not found."""
    path = Path(name).resolve()
    if not path.exists():
        path = find_run(name.removesuffix(BEST), program=PRETRAINING).resolve()
    for folder in (path, *path.parents[:2]):
        data = read_settings(RunFolder(folder).settings).get("arguments", {}).get("data")
        if data and Path(data).exists():
            return data
    raise UsageError(f"the training data of {name} was not found: pass --data FOLDER")


def find_run(name: str, runs: Path = RUNS, program: str | None = None) -> Path:
    """Return the folder `name`; 'auto' is the newest run of `program` (None: of any program).
    Raises UsageError if there is no such folder."""
    folder = Path(name_of(name, runs, program))
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    return folder


def name_of(name: str, runs: Path, program: str | None) -> str:
    """Return `name`; in 'auto' and 'auto@best', replace 'auto' by the newest run of `program`
    (None: of any program) that has logged. Raises UsageError if there is no such run."""
    if name.removesuffix(BEST) != "auto":
        return name
    if found := newest_first(runs.glob("*"), program, lambda run: run.metrics):
        return name.replace("auto", str(found[0].path))
    what = f"run of {program}" if program else "run"
    raise UsageError(f"no {what} in {runs.absolute()} yet: start one with bash run_accelerate.sh")
