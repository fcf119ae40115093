"""Save and load checkpoints of a run. `lm/storage/checkpoint.py` documents the files."""

from pathlib import Path

from accelerate.utils import gather_object

from lm.common.atomic import remove
from lm.common.errors import UsageError
from lm.engine.agreement import on_every_process, on_main_process
from lm.engine.engine import Engine
from lm.engine.whole_tensors import TrainingState
from lm.formats.portable import load_tensors
from lm.storage import checkpoint as files
from lm.storage.folder import RunFolder
from lm.training.build import random_state, restore_random
from lm.training.loss_meter import LossMeter


def copy_state(state: TrainingState, meter: LossMeter) -> tuple[dict[str, dict], dict]:
    """Copy the tensors of each file, and scalars for state.json. Every process must call this."""
    tensors = {files.WEIGHTS: state.weights(), files.OPTIMIZER: state.moments()}
    mine = random_state(state.engine.accelerator.device) | meter.state()
    ranks = gather_object([mine]) if state.engine.processes > 1 else [mine]
    tensors[files.RANDOM] = {}  # "RANK.NAME": value
    for rank, values in enumerate(ranks):
        tensors[files.RANDOM] |= {f"{rank}.{name}": value for name, value in values.items()}
    return tensors, state.scalars()


def is_best(engine: Engine, run: RunFolder, val_loss: float, pending: float | None = None) -> bool:
    """Return whether no checkpoint has a loss as low as this. `pending` is the loss of one that is
    being written. Every process must call this."""

    def decide() -> bool:
        losses = [pending, *map(files.val_loss, run.all_checkpoints())]
        return all(loss is None or val_loss < loss for loss in losses)

    return on_main_process(engine, decide)


def prune(run: RunFolder, keep_last: int) -> None:
    """Keep only the newest `keep_last` checkpoints and the best. Keep all if keep_last is 0."""
    if keep_last == 0:
        return
    checkpoints = run.all_checkpoints()
    keep = {*checkpoints[-keep_last:], files.best(checkpoints)}
    leftovers = run.checkpoints.glob("step-*.*")  # set aside at a resume, or unfinished
    for path in {*leftovers, *run.path.glob("weights.aside-*"), *checkpoints} - keep:
        remove(path)


def load_checkpoint(path: Path, engine: Engine, state: TrainingState, meter: LossMeter) -> None:
    """Load model, optimizer, `meter` and, for the same number of processes, the random generators.
    Every process must call this. Raises UsageError if the files cannot be used."""
    rank, device = engine.accelerator.process_index, engine.accelerator.device

    def attempt() -> None:
        try:
            scalars, moments = files.read_state(path), load_tensors(path / files.OPTIMIZER)
            state.load(files.saved_weights(path), moments, scalars, str(path))
            ranks = [{} for _ in range(scalars["processes"])]
            for name, value in load_tensors(path / files.RANDOM).items():
                number, _, key = name.partition(".")
                ranks[int(number)][key] = value
            meter.load_state(ranks, rank)
            if len(ranks) == engine.processes:
                restore_random(ranks[rank], device)
            elif engine.is_main:
                print("the number of processes has changed: any dropout masks change", flush=True)
        except LookupError as error:
            raise UsageError(f"checkpoint {path} has no {error}") from error

    on_every_process(engine, attempt)
