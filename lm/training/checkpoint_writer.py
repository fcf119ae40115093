"""Save and load checkpoints of a run. `lm/storage/checkpoint.py` documents the files."""

import time
from collections.abc import Callable
from functools import partial
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
from lm.training.inputs import Inputs
from lm.training.log import TrainingLog
from lm.training.loss_meter import LossMeter


class Checkpointer:
    """Copy the state of a run, and write the copy as a checkpoint."""

    def __init__(self, inputs: Inputs, state: TrainingState, compiled: bool, log: TrainingLog):
        self.folder = inputs.start.folder
        self.engine, self.state, self.log = state.engine, state, log
        lora = inputs.shapes.lora
        self.facts = {  # written to state.json of every checkpoint
            "model": inputs.config.to_dict(),
            "identity": inputs.identity,
            "processes": self.engine.processes,
            "compiled": compiled,  # a resumed run needs the same kernels
        } | ({"lora": vars(lora)} if lora else {})

    def copy(self, step: int, val_loss: float | None) -> Callable[[], bool]:
        """Copy the state; return the function that writes it, see `_write`. Every process must call
        this."""
        started = time.perf_counter()
        tensors = {files.WEIGHTS: self.state.weights(), files.OPTIMIZER: self.state.moments()}
        mine = random_state(self.engine.accelerator.device) | self.log.meter.state()
        ranks = gather_object([mine]) if self.engine.processes > 1 else [mine]
        tensors[files.RANDOM] = {}  # "RANK.NAME": value
        for rank, values in enumerate(ranks):
            tensors[files.RANDOM] |= {f"{rank}.{name}": value for name, value in values.items()}
        state = {"step": step, "val_loss": val_loss} | self.facts | self.state.scalars()
        return partial(self._write, tensors, state, time.perf_counter() - started)

    def is_best(self, val_loss: float) -> bool:
        """Return whether no checkpoint on the disk has a loss as low as this. Every process must
        call this."""

        def decide() -> bool:
            best = files.best(self.folder.all_checkpoints())
            return best is None or val_loss < files.val_loss(best)

        return on_main_process(self.engine, decide)

    def _write(self, tensors: dict, state: dict, stalled: float) -> bool:
        """Write a copy, which took `stalled` seconds; return whether this succeeded. A disk error
        is logged, does not stop training, and leaves the older checkpoints."""
        try:
            size = files.write_checkpoint(self.folder, tensors, state) / 1e6
        except Exception as error:  # an uncaught error would print a traceback
            self.log.say(f"CHECKPOINT NOT SAVED: {error}; older ones are kept")
            return False
        path = self.folder.checkpoint(state["step"])
        self.log.say(f"saved {path}: {size:.1f} MB; copying took {stalled:.2f} s")
        return True


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
