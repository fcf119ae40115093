"""Save and load checkpoints of a run. `lm/storage/checkpoint.py` documents the files."""

import math
import threading
import time
from pathlib import Path

from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file

from lm.common.atomic import remove
from lm.common.errors import UsageError
from lm.engine.agreement import on_every_process, on_main_process
from lm.engine.engine import CHECKPOINT_WRITER, Engine
from lm.engine.whole_tensors import TrainingState
from lm.formats.portable import load_tensors
from lm.storage import checkpoint as files
from lm.storage.folder import RunFolder, step_of
from lm.training.build import random_state, restore_random
from lm.training.inputs import Inputs
from lm.training.log import TrainingLog
from lm.training.loss_meter import LossMeter


class Checkpointer:
    """Save checkpoints. Keep the newest --keep_last and the one with the lowest validation loss."""

    def __init__(self, inputs: Inputs, state: TrainingState, compiled: bool, log: TrainingLog):
        self.folder, self.keep_last = inputs.start.folder, inputs.args.keep_last
        self.engine, self.state, self.log = state.engine, state, log
        lora = inputs.shapes.lora
        self.facts = {  # written to state.json of every checkpoint
            "model": inputs.config.to_dict(),
            "identity": inputs.identity,
            "processes": self.engine.processes,
            "compiled": compiled,  # a resumed run needs the same kernels
        } | ({"lora": vars(lora)} if lora else {})
        paths = self.folder.all_checkpoints()
        best = files.best([path for path in paths if step_of(path) <= inputs.start.step])
        # Of the checkpoints on disk and the one that is being written; true on the main process.
        self.lowest_val_loss = files.val_loss(best) if best else math.inf
        self._writer = threading.Thread()  # the thread that writes the latest checkpoint
        self.group = [self]  # checkpointers of all models that train together
        self._begun = self._saved = 0  # steps of the latest save and of the latest successful save

    def save(self, step: int, val_loss: float | None) -> None:
        """Copy the state; a thread writes it while training goes on. Every process must call this.
        A disk error is logged, does not stop training, and leaves the older checkpoints."""
        for other in self.group:  # a writer may still remove older checkpoints of this model
            other.wait()
        started, on_disk = time.perf_counter(), self.lowest_val_loss
        self.lowest_val_loss = min(on_disk, math.inf if val_loss is None else val_loss)
        tensors = {files.WEIGHTS: self.state.weights(), files.OPTIMIZER: self.state.moments()}
        mine = random_state(self.engine.accelerator.device) | self.log.meter.state()
        ranks = gather_object([mine]) if self.engine.processes > 1 else [mine]
        tensors[files.RANDOM] = {}  # "RANK.NAME": value
        for rank, values in enumerate(ranks):
            tensors[files.RANDOM] |= {f"{rank}.{name}": value for name, value in values.items()}
        state = {"step": step, "val_loss": val_loss} | self.facts | self.state.scalars()
        if self.engine.is_main:
            self._begun = step
            work = (tensors, state, time.perf_counter() - started, on_disk)
            self._writer = threading.Thread(target=self._write, args=work, name=CHECKPOINT_WRITER)
            self._writer.start()

    def wait(self) -> bool:
        """Wait for the save in progress, if any; return False if the latest save failed. Only the
        main process knows this; other processes return True."""
        if self._writer.ident:  # the thread was started
            self._writer.join()
        return self._saved == self._begun

    def is_best(self, val_loss: float) -> bool:
        """Return whether no checkpoint has a loss as low as this. Every process must call this."""
        return on_main_process(self.engine, lambda: val_loss < self.lowest_val_loss)

    def _write(self, tensors: dict, state: dict, stalled: float, on_disk: float) -> None:
        try:
            size = files.write_checkpoint(self.folder, tensors, state) / 1e6
        except Exception as error:  # an uncaught error would print a traceback
            self.lowest_val_loss = on_disk
            self.log.say(f"CHECKPOINT NOT SAVED: {error}; older ones are kept")
            return
        self._saved = state["step"]
        path = self.folder.checkpoint(state["step"])
        self.log.say(f"saved {path}: {size:.1f} MB; copying took {stalled:.2f} s")
        # Models resume from a common step: the last model to save a step prunes all folders.
        if all(other._saved == self._saved for other in self.group):
            for other in self.group:
                prune(other.folder, other.keep_last)


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
    Every process must call this. Raises UsageError or ConfigError if the files cannot be used."""
    rank, device = engine.accelerator.process_index, engine.accelerator.device

    def attempt() -> None:
        try:
            scalars, moments = files.read_state(path), load_tensors(path / files.OPTIMIZER)
            state.load(files.saved_weights(path), moments, scalars, str(path))
            ranks = [{} for _ in range(scalars["processes"])]
            for name, value in load_file(path / files.RANDOM).items():
                number, _, key = name.partition(".")
                ranks[int(number)][key] = value
            meter.load_state(ranks, rank)
            if len(ranks) == engine.processes:
                restore_random(ranks[rank], device)
            elif engine.is_main:
                print("the number of processes has changed: any dropout masks change", flush=True)
        except (SafetensorError, OSError, LookupError) as error:
            raise UsageError(f"checkpoint {path} cannot be used: {error}") from error

    on_every_process(engine, attempt)
