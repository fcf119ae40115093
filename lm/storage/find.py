"""Find a run by its path, or find the newest run."""

from collections.abc import Callable, Iterable
from pathlib import Path

from lm.common.errors import UsageError
from lm.storage.folder import RunFolder, read_settings

RUNS = Path("out/runs")
PRETRAINING = "train_pretrain_accelerate.py"
BEST = "@best"  # RUN@best is the checkpoint of RUN with the lowest validation loss


def newest(paths: Iterable[Path], program: str | None, is_wanted: Callable) -> RunFolder | None:
    """Return the run that was started or resumed last, as its settings say: copying a run changes
    the times of its files. Only runs of `program` (None: of all programs) with a true
    `is_wanted(run)` count. Return None if there is none."""
    times = {}
    for run in map(RunFolder, paths):
        if is_wanted(run) and program in (None, program_of(run)):
            changed = run.path.stat().st_mtime  # for runs older than the setting "started"
            times[run] = read_settings(run.settings).get("started", changed)
    return max(times, key=times.get, default=None)


def program_of(run: RunFolder) -> str:
    """Return the training program of a run; PRETRAINING if its settings name none (older runs)."""
    return read_settings(run.settings).get("program", PRETRAINING)


def data_of(path: Path) -> str:
    """Return the data folder of a run. `path` is the run, or a checkpoint or weights in the run.
    Raises UsageError if the data is not found."""
    path = path.resolve()
    for folder in (path, *path.parents[:2]):
        data = read_settings(RunFolder(folder).settings).get("arguments", {}).get("data")
        if data and Path(data).exists():
            return data
    raise UsageError(f"the training data of {path} was not found: pass --data FOLDER")


def has_weights(run: RunFolder) -> bool:
    """Return True for a run with final weights or a checkpoint."""
    return run.weights.is_dir() or bool(run.all_checkpoints())


def find_run(
    name: str, runs: Path = RUNS, program: str | None = None, is_wanted: Callable = has_weights
) -> Path:
    """Return the folder `name`; 'auto' is the `newest` run in the folder `runs`.
    Raises UsageError if there is no such folder."""
    folder = Path(name)
    if name == "auto":
        found = newest(runs.glob("*"), program, is_wanted)
        if found is None:
            what = f"run of {program}" if program else "run"
            nothing = f"no {what} with results in {runs.absolute()} yet"
            raise UsageError(f"{nothing}: start one with bash run_accelerate.sh")
        folder = found.path
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    return folder
