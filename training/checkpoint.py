"""Checkpoints: all that the next step depends on, complete or not there at all.

A checkpoint is a folder checkpoints/step-N:

    weights.safetensors    name → fp32 weights (the master weights under DeepSpeed)
    optimizer.safetensors  name.exp_avg and name.exp_avg_sq → AdamW's averages,
                           name.momentum_buffer → Muon's
    random.safetensors     per process, the state of its random generators and of its log line
    state.json             step, optimizer's step, loss scale, and what the run must have in common
    manifest.json          size and SHA-256 of each of these files

Nothing in it depends on the engine or the number of processes, and nothing can execute. The main
process copies everything to its CPU memory, training goes on, and a thread writes the copy: into a
folder of another name, read back and checked, renamed; then `latest` moves, then old ones go.
"""

import hashlib
import json
import os
import shutil
import threading
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from model.config import ConfigError
from model.portable import save_tensors
from training.errors import UsageError
from training.metrics import TrainingLog
from training.run_folder import RunFolder
from training.state import TrainingState

WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
RANDOM, STATE, MANIFEST = "random.safetensors", "state.json", "manifest.json"


class Checkpointer:
    """Saves checkpoints of a run and keeps the newest `keep_last` and the best by validation loss.

    Args:
        run: where they go.
        state: what they hold.
        keep_last: how many to keep; 0 keeps all.
        identity: what a run that resumes must have in common, see `differences`.
        log: tells what happened, and has a state of its own to save.
        compiled: recorded, so that a run that resumes computes as this one does.
    """

    def __init__(
        self,
        run: RunFolder,
        state: TrainingState,
        keep_last: int,
        identity: dict,
        log: TrainingLog,
        compiled: bool = False,
    ):
        self.run, self.accelerator, self.state = run, state.accelerator, state
        self.keep_last, self.identity, self.log = keep_last, identity, log
        self.compiled = compiled
        self._writer: threading.Thread | None = None
        self._last_one_saved = True
        self._outcome: str | Exception | None = None

    def save(self, step: int, val_loss: float | None) -> None:
        """Copy the state now and write it behind training. Every process must call it.

        A disk that is full or refuses does not stop training: it is reported, the checkpoint before
        stays, and the next call tries again.
        """
        self.wait()
        started = time.perf_counter()
        weights, averages, scalars = (
            self.state.weights(),
            self.state.averages(),
            self.state.scalars(),
        )
        random = self._gather_random()
        if not self.accelerator.is_main_process:
            return
        values = {
            "step": step,
            "val_loss": val_loss,
            "identity": self.identity,
            "processes": self.accelerator.num_processes,
            "compiled": self.compiled,
        } | scalars
        stalled = time.perf_counter() - started
        self._outcome = None
        self._writer = threading.Thread(
            target=self._write, args=(step, weights, averages, random, values, stalled)
        )
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

    def _write(self, step, weights, averages, random, values, stalled) -> None:
        path = self.run.checkpoint(step)
        partial = path.with_name(f"{path.name}.partial")
        started = time.perf_counter()
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for name, tensors in ((WEIGHTS, weights), (OPTIMIZER, averages), (RANDOM, random)):
                save_tensors(partial / name, tensors)
                _sync(partial / name)
            _write_json(partial / STATE, values)
            size = _write_manifest(partial)
            _remove(path)  # of a run that came this far before
            partial.rename(path)
            _sync(path.parent)
            _replace_text(self.run.latest, path.name)
        except Exception as error:  # whatever it is, it must not end in a thread nobody looks at
            shutil.rmtree(partial, ignore_errors=True)
            self._outcome = error
            return
        seconds = time.perf_counter() - started
        self._outcome = (
            f"saved {path}: training stalled {stalled:.2f} s, {size / 1e6:.1f} MB written behind "
            f"it at {size / 1e6 / seconds:.0f} MB/s"
        )
        self._prune()

    def _gather_random(self) -> dict[str, Tensor]:
        """Every process's random state and unfinished log line, keyed rank.what."""
        mine = {"cpu": torch.get_rng_state(), "log": self.log.state()}
        if self.accelerator.device.type == "cuda":
            mine["cuda"] = torch.cuda.get_rng_state(self.accelerator.device)
        everyone = gather_object([mine]) if self.accelerator.num_processes > 1 else [mine]
        return {
            f"{rank}.{k}": v for rank, tensors in enumerate(everyone) for k, v in tensors.items()
        }

    def _prune(self) -> None:
        """Remove all but the newest keep_last and the one with the lowest validation loss."""
        if self.keep_last == 0:
            return
        checkpoints = self.run.all_checkpoints()
        losses = {path: value for path in checkpoints if (value := _val_loss(path)) is not None}
        keep = {*checkpoints[-self.keep_last :], min(losses, key=losses.get, default=None)}
        for path in checkpoints:
            if path not in keep:
                _remove(path)
        for leftover in self.run.checkpoints.glob("step-*.*"):  # of a kill, or set aside
            shutil.rmtree(leftover, ignore_errors=True)


def space_warning(run: RunFolder, n_parameters: int, keep_last: int) -> str | None:
    """What to tell if the disk has too little room for this run's checkpoints; None if it has."""
    size = 12 * n_parameters  # weights and two averages in fp32
    count = max(keep_last, 1) + 2  # the best, and the one being written
    free = shutil.disk_usage(run.path).free
    if free >= count * size:
        return None
    return (
        f"WARNING: {free / 1e9:.2f} GB free for {run.path}, but {count} checkpoints of "
        f"{size / 1e9:.2f} GB may be there at once: make room, or lower --keep_last"
    )


def load_checkpoint(path: Path, state: TrainingState, log: TrainingLog) -> None:
    """Put a checkpoint into the prepared model and optimizer, on every process.

    Raises:
        UsageError: files missing or damaged, or of a model of another shape.
    """
    try:
        scalars = _read_json(path / STATE)
        state.load(load_file(path / WEIGHTS), load_file(path / OPTIMIZER), scalars, str(path))
        _restore_random(load_file(path / RANDOM), scalars["processes"], state.accelerator, log)
    except (SafetensorError, ConfigError, OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"checkpoint {path} cannot be used: {error}") from error
    except (RuntimeError, RecursionError) as error:  # torch's, about a random state that is none
        raise UsageError(f"checkpoint {path} cannot be used: {error}") from error


def _restore_random(
    random: dict[str, Tensor], saved: int, accelerator: Accelerator, log: TrainingLog
) -> None:
    rank, processes = accelerator.process_index, accelerator.num_processes
    if saved == processes:
        torch.set_rng_state(random[f"{rank}.cpu"])
        if accelerator.device.type == "cuda" and f"{rank}.cuda" in random:
            torch.cuda.set_rng_state(random[f"{rank}.cuda"], accelerator.device)
        log.load_state(random[f"{rank}.log"])
        return
    if accelerator.is_main_process:
        print("another number of processes: dropout, if any, takes other masks", flush=True)
    # The unfinished log line: as many micro-batches as before, divided among more or fewer.
    lines = torch.stack([random[f"{other}.log"] for other in range(saved)])
    log.load_state(lines.mean(0) * torch.tensor([saved / processes, saved / processes, 1]))


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files by its manifest; None if it is sound."""
    try:
        files = _read_json(path / MANIFEST)["files"]
        if files.keys() != {WEIGHTS, OPTIMIZER, RANDOM, STATE}:
            return f"the manifest names {', '.join(sorted(files))}"
        for name, expected in files.items():
            size = (path / name).stat().st_size
            if size != expected["size"]:
                return f"{name} is {size} bytes long instead of {expected['size']}"
            if _sha256(path / name) != expected["sha256"]:
                return f"the checksum of {name} is wrong"
        state = _read_json(path / STATE)
        types = {"step": int, "identity": dict, "processes": int, "optimizer_step": int}
        for key, kind in types.items():
            if not isinstance(state[key], kind):
                return f"{STATE} says {key} is {state[key]!r}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def read_state(path: Path) -> dict:
    """A checkpoint's state.json; only of one without `damage`."""
    return _read_json(path / STATE)


def differences(saved: dict, current: dict) -> list[str]:
    """Where two runs' identities differ, one line each, for people."""
    keys = sorted(saved.keys() | current.keys())
    return [
        f"{key}: {saved.get(key)} in the checkpoint, {current.get(key)} now"
        for key in keys
        if saved.get(key) != current.get(key)
    ]


def _val_loss(path: Path) -> float | None:
    try:
        return _read_json(path / STATE)["val_loss"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _remove(path: Path) -> None:
    """Delete a checkpoint. Killed halfway, it has lost its name before it lost a file."""
    if path.exists():
        doomed = path.with_name(f"{path.name}.old")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _write_manifest(folder: Path) -> int:
    """Read every file back from the folder and note size and checksum; returns the sum of sizes."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    _write_json(folder / MANIFEST, {"files": files})
    _sync(folder)
    return sum(entry["size"] for entry in files.values())


def _write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    _sync(path)


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def _replace_text(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.partial")
    aside.write_text(text + "\n", encoding="utf-8")
    _sync(aside)
    aside.replace(path)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Have a file's or folder's contents on the disk, not in the system's memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
