"""Save a run while it trains on, and load a checkpoint; `storage/checkpoint.py` has the format."""

import math
import threading
import time
from pathlib import Path

from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file

from common.atomic import remove
from common.errors import UsageError
from formats.portable import load_tensors
from storage import checkpoint as files
from storage.folder import RunFolder, step_of
from training.build import BuiltModel, random_state, restore_random
from training.engine.launch import Engine
from training.engine.main_process import on_every_process, on_main_process
from training.engine.state import TrainingState
from training.interruption import CHECKPOINT_WRITER
from training.log import LossMeter, TrainingLog
from training.prepare import Prepared


class Checkpointer:
    """Save checkpoints; keep the newest --keep_last of them and the best by validation loss."""

    def __init__(self, prepared: Prepared, engine: Engine, built: BuiltModel, log: TrainingLog):
        self.folder, self.keep_last = prepared.start.folder, prepared.args.keep_last
        self.engine, self.state, self.log = engine, built.state, log
        lora, step = prepared.shapes.lora, prepared.start.step
        self.facts = {
            "model": prepared.config.to_dict(),
            "identity": prepared.identity,
            "processes": engine.processes,
            "compiled": built.compilation.on,  # a run that resumes computes as this one does
        } | ({"lora": vars(lora)} if lora else {})
        # All need the same answer, and other machines may see the files late.
        paths = [path for path in self.folder.all_checkpoints() if step_of(path) <= step]
        lowest = files.val_loss(found) if (found := files.best(paths)) else math.inf
        self.lowest = on_main_process(engine, lambda: lowest)
        self._writer = threading.Thread()
        self._saved = True  # False: the last save has failed

    def save(self, step: int, val_loss: float | None) -> None:
        """Copy the state now and write it behind training. Every process must call it. A disk that
        refuses does not stop training: the checkpoint before stays, and the next call tries again.
        """
        self.wait()
        started = time.perf_counter()
        self.lowest = min(self.lowest, math.inf if val_loss is None else val_loss)
        tensors = {files.WEIGHTS: self.state.weights(), files.OPTIMIZER: self.state.moments()}
        mine = random_state(self.engine.accelerator.device) | self.log.meter.state()
        ranks = gather_object([mine]) if self.engine.processes > 1 else [mine]
        tensors[files.RANDOM] = {f"{i}.{k}": v for i, of in enumerate(ranks) for k, v in of.items()}
        state = {"step": step, "val_loss": val_loss} | self.facts | self.state.scalars()
        if self.engine.is_main:
            work = (tensors, state, time.perf_counter() - started)
            self._writer = threading.Thread(target=self._write, args=work, name=CHECKPOINT_WRITER)
            self._writer.start()

    def wait(self) -> bool:
        """Wait for the save under way; return False if the last one failed."""
        if self._writer.ident:
            self._writer.join()
        return self._saved

    def _write(self, tensors: dict, state: dict, stalled: float) -> None:
        self._saved = False
        try:
            size = files.write_checkpoint(self.folder, tensors, state) / 1e6
        except Exception as error:  # whatever it is, it must not end in a thread nobody looks at
            self.log.say(f"CHECKPOINT NOT SAVED: {error}; the one before is kept, training goes on")
            return
        self._saved, path = True, self.folder.checkpoint(state["step"])
        self.log.say(f"saved {path}: training stalled {stalled:.2f} s, {size:.1f} MB behind it")
        prune(self.folder, self.keep_last)


def prune(run: RunFolder, keep_last: int) -> None:
    """Remove all checkpoints but the newest keep_last and the best one; 0 keeps all."""
    if keep_last == 0:
        return
    checkpoints = run.all_checkpoints()
    keep = {*checkpoints[-keep_last:], files.best(checkpoints)}
    leftovers = run.checkpoints.glob("step-*.*")  # of a kill
    for path in [*leftovers, *(path for path in checkpoints if path not in keep)]:
        remove(path)


def load_checkpoint(path: Path, engine: Engine, state: TrainingState, meter: LossMeter) -> None:
    """Load a checkpoint into the prepared model and optimizer. Every process must call it. Raises
    UsageError: files that cannot be read."""
    rank, device = engine.accelerator.process_index, engine.accelerator.device

    def attempt() -> None:
        try:
            scalars, moments = files.read_state(path), load_tensors(path / files.OPTIMIZER)
            state.load(files.saved_weights(path), moments, scalars, str(path))
            ranks = [{} for _ in range(scalars["processes"])]
            for name, value in load_file(path / files.RANDOM).items():
                number, _, what = name.partition(".")
                ranks[int(number)][what] = value
            meter.load_state(ranks, rank)
            if len(ranks) == engine.processes:
                restore_random(ranks[rank], device)
            elif engine.is_main:
                print("another number of processes: dropout, if any, takes other masks", flush=True)
        except (SafetensorError, OSError, LookupError) as error:
            raise UsageError(f"checkpoint {path} cannot be used: {error}") from error

    on_every_process(engine, attempt)
