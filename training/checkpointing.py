"""Saving a run behind its training, and putting a checkpoint back. `runs/checkpoint.py` has the
format.

The main process copies everything to its CPU memory, training goes on, and a thread writes the
copy.
"""

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.atomic import remove
from common.errors import UsageError
from formats.portable import TensorFile
from model.config import LMConfig
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
from runs.folder import RunFolder
from training.engine.launch import Engine
from training.engine.main_process import on_every_process, on_main_process
from training.engine.state import TrainingState
from training.interruption import CHECKPOINT_WRITER
from training.log import TrainingLog


@dataclass(kw_only=True)
class Checkpointer:
    """Saves checkpoints; keeps the newest `keep_last` and the best by validation loss."""

    run: RunFolder
    engine: Engine
    state: TrainingState
    keep_last: int  # 0 keeps all
    config: LMConfig  # recorded like the next two
    identity: dict  # what else a run that resumes must have in common, see `resume.run_identity`
    compiled: bool  # a run that resumes computes as this one does
    log: TrainingLog  # tells what happened, and has a state of its own to save
    start_step: int = 0  # checkpoints after it are of a course not taken
    beside: Sequence[RunFolder] = ()  # runs that go on with this one, from a step that all have

    def __post_init__(self):
        # A machine may see the others' files late, and what is best is decided alike on all.
        self._lowest = on_main_process(self.engine.accelerator, self._lowest_so_far)
        self._writer: threading.Thread | None = None
        self._last_one_saved = True
        self._outcome: str | Exception | None = None

    def _lowest_so_far(self) -> float:
        """Validation loss at a checkpoint of this course."""
        before = (p for p in self.run.all_checkpoints() if int(p.name[5:]) <= self.start_step)
        found = best(before)
        return val_loss(found) if found else math.inf

    def is_best(self, val_loss: float | None) -> bool:
        """Whether a validation, if there was one, is the best so far; the same on every process."""
        if val_loss is None or val_loss >= self._lowest:
            return False
        self._lowest = val_loss
        return True

    def save(self, step: int, val_loss: float | None) -> None:
        """Copy the state now and write it behind training. Every process must call it.

        A disk that is full or refuses does not stop training: it is reported, the checkpoint before
        stays, and the next call tries again.
        """
        self.wait()
        started = time.perf_counter()
        tensors = {
            WEIGHTS: self.state.weights(),
            OPTIMIZER: self.state.moments(),
            RANDOM: self._gather_random(),
        }
        scalars = self.state.scalars()
        if not self.engine.is_main:
            return
        state = {
            "step": step,
            "val_loss": val_loss,
            "model": self.config.to_dict(),
            "identity": self.identity,
            "processes": self.engine.processes,
            "compiled": self.compiled,
        } | scalars
        if lora := self.state.model.lora:
            state["lora"] = vars(lora)
        stalled = time.perf_counter() - started
        self._outcome = None
        work = (tensors, state, stalled)
        self._writer = threading.Thread(target=self._write, args=work, name=CHECKPOINT_WRITER)
        self._writer.start()

    def poll(self) -> None:
        """Report a save that has ended since."""
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
            size = write_checkpoint(self.run, tensors, state)
        except Exception as error:  # whatever it is, it must not end in a thread nobody looks at
            self._outcome = error
            return
        speed = size / 1e6 / (time.perf_counter() - started)
        self._outcome = (
            f"saved {self.run.checkpoint(state['step'])}: training stalled {stalled:.2f} s, "
            f"{size / 1e6:.1f} MB written behind it at {speed:.0f} MB/s"
        )
        prune(self.run, self.keep_last, self.beside)

    def _gather_random(self) -> dict[str, Tensor]:
        """Every process's random state and unfinished log line, keyed rank.what."""
        mine = {"cpu": torch.get_rng_state()}
        device = self.engine.accelerator.device
        mine["log"] = self.log.state()
        if device.type == "cuda":
            mine["cuda"] = torch.cuda.get_rng_state(device)
        everyone = gather_object([mine]) if self.engine.processes > 1 else [mine]
        return {
            f"{rank}.{k}": v for rank, tensors in enumerate(everyone) for k, v in tensors.items()
        }


def prune(run: RunFolder, keep_last: int, beside: Sequence[RunFolder] = ()) -> None:
    """Remove all but the newest keep_last, the one with the lowest validation loss, and the newest
    that runs beside this one have too; 0 keeps all."""
    if keep_last == 0:
        return
    checkpoints = run.all_checkpoints()
    steps = ({path.name for path in each.all_checkpoints()} for each in (run, *beside))
    shared = max(set.intersection(*steps), default="")
    keep = {*checkpoints[-keep_last:], best(checkpoints), run.checkpoints / shared}
    for path in checkpoints:
        if path not in keep:
            remove(path)
    for leftover in run.checkpoints.glob("step-*.*"):  # of a kill, or set aside
        remove(leftover)


def load_checkpoint(path: Path, engine: Engine, state: TrainingState, log: TrainingLog) -> None:
    """Put a checkpoint into the prepared model and optimizer, on every process; all must call this.
    Raises UsageError: files missing or damaged, or of a model of another shape."""

    def attempt() -> None:
        try:
            scalars = read_state(path)
            require_same_adapters(scalars.get("lora"), state.model.lora, str(path))
            moments = TensorFile(path / OPTIMIZER)
            state.load(saved_weights(path), moments, scalars, str(path))
            _restore_random(load_file(path / RANDOM), scalars["processes"], engine, log)
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
    """Raises UsageError: the adapters of a checkpoint are others than the model's."""
    saved, now = saved or {}, vars(lora) if lora else {}
    if different := [name for name in saved | now if saved.get(name) != now.get(name)]:
        said = [f"{name} {saved.get(name)} there and {now.get(name)} now" for name in different]
        raise UsageError(f"{source} has other adapters (LoRA): {', '.join(said)}")


def _restore_random(
    random: dict[str, Tensor], saved: int, engine: Engine, log: TrainingLog
) -> None:
    """Of this process, from those of the `saved` processes that wrote the checkpoint."""
    rank = engine.accelerator.process_index
    device = engine.accelerator.device
    if saved == engine.processes:
        torch.set_rng_state(random[f"{rank}.cpu"])
        if device.type == "cuda" and f"{rank}.cuda" in random:
            torch.cuda.set_rng_state(random[f"{rank}.cuda"], device)
        log.load_state(random[f"{rank}.log"])
        return
    if engine.is_main:
        print("another number of processes: dropout, if any, takes other masks", flush=True)
    # The unfinished log line: as many micro-batches as before, divided among more or fewer.
    lines = torch.stack([random[f"{other}.log"] for other in range(saved)])
    share = torch.full_like(lines[0], saved / engine.processes)
    share[2] = 1  # steps that were skipped
    log.load_state(lines.mean(0) * share)
