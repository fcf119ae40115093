"""Save a run while it trains on, and load a checkpoint; `runs/checkpoint.py` has the format.

The main process copies the state to its memory, training goes on, and a thread writes the copy.
"""

import math
import threading
import time
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.atomic import remove
from common.errors import UsageError
from formats.portable import load_tensors
from runs.checkpoint import (
    OPTIMIZER,
    RANDOM,
    WEIGHTS,
    best,
    read_state,
    saved_weights,
    val_loss,
    write_checkpoint,
)
from runs.folder import RunFolder, step_of
from training.build import BuiltModel, random_state, restore_random
from training.engine.launch import Engine
from training.engine.main_process import on_every_process, on_main_process
from training.engine.state import TrainingState
from training.interruption import CHECKPOINT_WRITER
from training.log import LossMeter, TrainingLog
from training.prepare import Prepared

METER = "log."  # begins the names of a rank's unfinished log line in a checkpoint


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
        # A machine may see the others' files late, and the best checkpoint is the same on all.
        self.lowest = on_main_process(engine, lambda: lowest_until(self.folder, step))
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None  # of the last save

    def save(self, step: int, val_loss: float | None) -> None:
        """Copy the state now and write it behind training. Every process must call it.

        A disk that is full or refuses does not stop training: it is reported, the checkpoint before
        stays, and the next call tries again.
        """
        self.wait()
        started = time.perf_counter()
        self.lowest = min(self.lowest, math.inf if val_loss is None else val_loss)
        tensors = {
            WEIGHTS: self.state.weights(),
            OPTIMIZER: self.state.moments(),
            RANDOM: self._gather_random(),
        }
        state = {"step": step, "val_loss": val_loss} | self.facts | self.state.scalars()
        if not self.engine.is_main:
            return
        work = (tensors, state, time.perf_counter() - started)
        self._writer = threading.Thread(target=self._write, args=work, name=CHECKPOINT_WRITER)
        self._writer.start()

    def wait(self) -> bool:
        """Wait for the save under way; return False if the last one failed."""
        if self._writer is not None:
            self._writer.join()
        return self._failure is None

    def _write(self, tensors: dict, state: dict, stalled: float) -> None:
        """Write the copy, in the thread, and say how it ended."""
        started, self._failure = time.perf_counter(), None
        try:
            size = write_checkpoint(self.folder, tensors, state) / 1e6
        except Exception as error:  # whatever it is, it must not end in a thread nobody looks at
            self._failure = error
            self.log.say(f"CHECKPOINT NOT SAVED: {error}; the one before is kept, training goes on")
            return
        speed = size / (time.perf_counter() - started)
        self.log.say(
            f"saved {self.folder.checkpoint(state['step'])}: training stalled {stalled:.2f} s, "
            f"{size:.1f} MB written behind it at {speed:.0f} MB/s"
        )
        prune(self.folder, self.keep_last)

    def _gather_random(self) -> dict[str, Tensor]:
        """Return every rank's random state and unfinished log line, by the names "RANK.what"."""
        mine = random_state(self.engine.accelerator.device)
        for name, value in self.log.meter.state().items():
            mine[METER + name] = torch.tensor(value, dtype=torch.float64)
        everyone = gather_object([mine]) if self.engine.processes > 1 else [mine]
        return {
            f"{rank}.{k}": v for rank, tensors in enumerate(everyone) for k, v in tensors.items()
        }


def lowest_until(run: RunFolder, step: int) -> float:
    """Return the lowest validation loss of the checkpoints up to this step."""
    found = best(path for path in run.all_checkpoints() if step_of(path) <= step)
    return val_loss(found) if found else math.inf


def prune(run: RunFolder, keep_last: int) -> None:
    """Remove all checkpoints but the newest keep_last and the one with the lowest validation loss;
    0 keeps all."""
    if keep_last == 0:
        return
    checkpoints = run.all_checkpoints()
    keep = {*checkpoints[-keep_last:], best(checkpoints)}
    for path in checkpoints:
        if path not in keep:
            remove(path)
    for leftover in run.checkpoints.glob("step-*.*"):  # of a kill, or set aside
        remove(leftover)


def load_checkpoint(path: Path, engine: Engine, state: TrainingState, meter: LossMeter) -> None:
    """Load a checkpoint into the prepared model and optimizer. Every process must call it.

    Raises UsageError: files that cannot be read.
    """

    def attempt() -> None:
        try:
            scalars = read_state(path)
            moments = load_tensors(path / OPTIMIZER)
            state.load(saved_weights(path), moments, scalars, str(path))
            _restore_random(load_file(path / RANDOM), scalars["processes"], engine, meter)
        except (SafetensorError, OSError, LookupError) as error:
            raise UsageError(f"checkpoint {path} cannot be used: {error}") from error

    on_every_process(engine, attempt)


def _restore_random(
    saved: dict[str, Tensor], processes: int, engine: Engine, meter: LossMeter
) -> None:
    """Restore this rank's random state and log line from what so many ranks saved."""
    rank, device = engine.accelerator.process_index, engine.accelerator.device
    ranks = [
        {k.removeprefix(begin): v for k, v in saved.items() if k.startswith(begin)}
        for begin in (f"{other}." for other in range(processes))
    ]
    meter.load_state([_meter_state(each, meter) for each in ranks], rank)
    if processes == engine.processes:
        restore_random(ranks[rank], device)
    elif engine.is_main:
        print("another number of processes: dropout, if any, takes other masks", flush=True)


def _meter_state(saved: dict[str, Tensor], meter: LossMeter) -> dict[str, float]:
    """Return a rank's unfinished log line."""
    if "log" in saved:  # earlier versions wrote one vector
        loss, weight, skipped, *parts = saved["log"].tolist()
        sums = dict(zip(meter.names, (loss, *parts, weight), strict=True))
        return sums | {"skipped_steps": skipped}
    return {k.removeprefix(METER): v.item() for k, v in saved.items() if k.startswith(METER)}
