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
from model.lora import LoRA
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
from training.build import BuiltModel
from training.engine.launch import Engine
from training.engine.main_process import on_every_process, on_main_process
from training.engine.state import TrainingState
from training.interruption import CHECKPOINT_WRITER
from training.log import TrainingLog
from training.meter import LossMeter
from training.prepare import Prepared

METER = "log."  # begins the names of a rank's unfinished log line in a checkpoint


class Checkpointer:
    """Save checkpoints; keep the newest --keep_last of them and the best by validation loss.

    Args:
        log: says what was saved; the state of its meter is part of a checkpoint.
    """

    def __init__(self, prepared: Prepared, engine: Engine, built: BuiltModel, log: TrainingLog):
        self.folder = prepared.start.folder
        self.keep_last = prepared.args.keep_last
        self.engine, self.log = engine, log
        self.state: TrainingState = built.state
        lora = prepared.shapes.lora
        self.facts = {
            "model": prepared.config.to_dict(),
            "identity": prepared.identity,
            "processes": engine.processes,
            "compiled": built.compilation.on,  # a run that resumes computes as this one does
        } | ({"lora": vars(lora)} if lora else {})
        # A machine may see the others' files late, and the best checkpoint is the same on all.
        self.lowest = on_main_process(engine, lambda: self._lowest_until(prepared.start.step))
        self._writer: threading.Thread | None = None
        self._last_one_saved = True
        self._outcome: str | Exception | None = None

    def _lowest_until(self, step: int) -> float:
        """Return the lowest validation loss of the checkpoints up to this step."""
        found = best(p for p in self.folder.all_checkpoints() if step_of(p) <= step)
        return val_loss(found) if found else math.inf

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
        scalars = self.state.scalars()
        if not self.engine.is_main:
            return
        state = {"step": step, "val_loss": val_loss} | self.facts | scalars
        stalled = time.perf_counter() - started
        self._outcome = None
        work = (tensors, state, stalled)
        self._writer = threading.Thread(target=self._write, args=work, name=CHECKPOINT_WRITER)
        self._writer.start()

    def poll(self) -> None:
        """Report a save that has ended since the last call."""
        if self._writer is not None and not self._writer.is_alive():
            self.wait()

    def wait(self) -> bool:
        """Wait for the save under way and report it; False if the last one failed."""
        if self._writer is None:
            return self._last_one_saved
        self._writer.join()
        self._writer = None
        self._last_one_saved = isinstance(self._outcome, str)
        if self._last_one_saved:
            self.log.say(self._outcome)
            return True
        self.log.say(
            f"CHECKPOINT NOT SAVED: {self._outcome}; the one before is kept, training goes on, "
            "the next save tries again"
        )
        return False

    def _write(self, tensors: dict, state: dict, stalled: float) -> None:
        started = time.perf_counter()
        try:
            size = write_checkpoint(self.folder, tensors, state)
        except Exception as error:  # whatever it is, it must not end in a thread nobody looks at
            self._outcome = error
            return
        speed = size / 1e6 / (time.perf_counter() - started)
        self._outcome = (
            f"saved {self.folder.checkpoint(state['step'])}: training stalled {stalled:.2f} s, "
            f"{size / 1e6:.1f} MB written behind it at {speed:.0f} MB/s"
        )
        prune(self.folder, self.keep_last)

    def _gather_random(self) -> dict[str, Tensor]:
        """Return every rank's random state and unfinished log line, by the names "RANK.what"."""
        mine = {"cpu": torch.get_rng_state()}
        device = self.engine.accelerator.device
        if device.type == "cuda":
            mine["cuda"] = torch.cuda.get_rng_state(device)
        for name, value in self.log.meter.state().items():
            mine[METER + name] = torch.tensor(value, dtype=torch.float64)
        everyone = gather_object([mine]) if self.engine.processes > 1 else [mine]
        return {
            f"{rank}.{k}": v for rank, tensors in enumerate(everyone) for k, v in tensors.items()
        }


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

    Raises UsageError: files missing or damaged, or of a model of another shape.
    """

    def attempt() -> None:
        try:
            scalars = read_state(path)
            require_same_adapters(scalars.get("lora"), state.model.lora, str(path))
            moments = load_tensors(path / OPTIMIZER)
            state.load(saved_weights(path), moments, scalars, str(path))
            _restore_random(load_file(path / RANDOM), scalars["processes"], engine, meter)
        except (
            SafetensorError,
            OSError,
            ValueError,
            LookupError,
            TypeError,
            RuntimeError,
        ) as error:
            raise UsageError(f"checkpoint {path} cannot be used: {error}") from error

    on_every_process(engine, attempt)


def require_same_adapters(saved: dict | None, lora: LoRA | None, source: str) -> None:
    """Raise UsageError where a checkpoint's adapters differ from the model's."""
    saved, now = saved or {}, vars(lora) if lora else {}
    if different := [name for name in saved | now if saved.get(name) != now.get(name)]:
        said = [f"{name} {saved.get(name)} there and {now.get(name)} now" for name in different]
        raise UsageError(f"{source} has other adapters (LoRA): {', '.join(said)}")


def _restore_random(
    random: dict[str, Tensor], saved: int, engine: Engine, meter: LossMeter
) -> None:
    """Restore this rank's random state from a checkpoint that `saved` ranks wrote."""
    rank, device = engine.accelerator.process_index, engine.accelerator.device
    states = [_meter_state(random, f"{other}.", meter) for other in range(saved)]
    meter.load_state(states, rank)
    if saved == engine.processes:
        torch.set_rng_state(random[f"{rank}.cpu"])
        if device.type == "cuda" and f"{rank}.cuda" in random:
            torch.cuda.set_rng_state(random[f"{rank}.cuda"], device)
    elif engine.is_main:
        print("another number of processes: dropout, if any, takes other masks", flush=True)


def _meter_state(random: dict[str, Tensor], rank: str, meter: LossMeter) -> dict[str, float]:
    """Return a rank's unfinished log line."""
    begin = rank + METER
    if (old := random.get(rank + "log")) is not None:  # earlier versions wrote it without names
        loss, weight, skipped, *parts = old.tolist()
        sums = dict(zip(meter.names, (loss, *parts), strict=True))
        return sums | {"weight": weight, "skipped_steps": skipped}
    return {k.removeprefix(begin): v.item() for k, v in random.items() if k.startswith(begin)}
