"""Write, verify and read checkpoints.

A checkpoint is the folder checkpoints/step-N of a run. It is complete or absent. Its files:

    weights.safetensors    name → trained weights in fp32 (under DeepSpeed, the master weights)
    optimizer.safetensors  name.exp_avg and name.exp_avg_sq → AdamW's moments,
                           name.momentum_buffer → Muon's momentum
    random.safetensors     per process: states of random generators, and sums for the next log line
    state.json             step, AdamW's step, validation loss, loss scale, Muon's equal rows,
                           number of processes, compiled or not, model, adapters;
                           "identity": what a resume must keep
    manifest.json          size and SHA-256 of each file above

Every engine that supports the run's optimizer can load a checkpoint, with any number of processes.
If a run has adapters, its initial weights are in its folder base/. No file contains code.
"""

import hashlib
import sys
from collections import ChainMap
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from lm.common.atomic import whole_folder, write_whole
from lm.common.errors import UsageError
from lm.data.tokenizer import copy_tokenizer
from lm.formats import portable
from lm.storage.folder import RunFolder
from model.config import LMConfig
from model.lora import LoRA

WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
RANDOM, STATE = "random.safetensors", "state.json"
MANIFEST = "manifest.json"


def write_checkpoint(run: RunFolder, tensors: dict[str, dict[str, Tensor]], state: dict) -> int:
    """Write the checkpoint of state["step"] and return its size in bytes.
    `tensors` maps the name of each file to its tensors by name."""
    path = run.checkpoint(state["step"])
    with whole_folder(path) as partial:
        for name, content in tensors.items():
            portable.save_tensors(partial / name, content)
        portable.write_json(partial / STATE, state)
        size = _write_manifest(partial)
    write_whole(run.latest, path.name + "\n")
    return size


def write_base(run: RunFolder, config: LMConfig, weights: dict, tokenizer: Path) -> None:
    """Write the initial weights of a run with adapters, and the tokenizer, into base/."""
    try:
        with whole_folder(run.base) as folder:
            portable.save_portable(folder, config, weights)
            _write_manifest(folder)
            copy_tokenizer(tokenizer, folder)
    except OSError as error:
        raise UsageError(f"{run.base} cannot be written: {error.strerror}") from error


def _write_manifest(folder: Path) -> int:
    """Write the manifest of all files in the folder; return their total size in bytes."""
    files = {file.name: _facts_of(file) for file in sorted(folder.iterdir())}
    portable.write_json(folder / MANIFEST, {"files": files})
    return sum(file["size"] for file in files.values())


def _facts_of(path: Path) -> dict:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def damage(path: Path) -> str | None:
    """Describe the damage to a checkpoint or to the base/ of its run; None if both are intact."""
    try:
        _compare(path, {WEIGHTS, OPTIMIZER, RANDOM, STATE})
        if saved_lora(path):
            _compare(run_of(path).base, {portable.CONFIG_FILE, portable.WEIGHTS_FILE})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        return f"{kind}{error}"
    return None


def _compare(folder: Path, names: set[str]) -> None:
    """Raise an error unless the manifest lists exactly `names` with the files' true checksums."""
    files = portable.read_json(folder / MANIFEST)["files"]
    if files.keys() != names:
        raise UsageError(f"{MANIFEST} does not list exactly {', '.join(sorted(names))}")
    for name, facts in files.items():
        if _facts_of(folder / name) != facts:
            raise UsageError(f"the checksum of {name} is wrong")


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints of the run `path`, or `path` itself if it is a checkpoint."""
    return [path] if (path / STATE).exists() else RunFolder(path).all_checkpoints()


def newest_undamaged(*runs: list[Path]) -> list[Path]:
    """Return one of the checkpoints of each run: those of the newest step that is undamaged in all
    runs, or [] if there are no checkpoints. Print damage of later checkpoints to stderr. Raises
    UsageError if there is no such step."""
    by_name = [{path.name: path for path in checkpoints} for checkpoints in runs]
    found = "no step has a checkpoint of every model: leave out a --model that has none"
    for name in sorted(set.intersection(*map(set, by_name)), reverse=True):
        paths = [checkpoints[name] for checkpoints in by_name]
        problems = {path: problem for path in paths if (problem := damage(path))}
        if not problems:
            return paths
        for path, problem in problems.items():
            print(f"DAMAGED CHECKPOINT {path}: {problem}", file=sys.stderr, flush=True)
            found = f"no undamaged checkpoint: {path} is damaged: {problem}"
    if any(runs):
        raise UsageError(found)
    return []


def best(checkpoints: Iterable[Path]) -> Path | None:
    """Return the checkpoint with the lowest validation loss; None if no checkpoint has a loss."""
    losses = {path: val_loss(path) for path in checkpoints}
    measured = [path for path, loss in losses.items() if loss is not None]
    return min(measured, key=losses.get, default=None)


def val_loss(path: Path) -> float | None:
    """Return the validation loss in state.json; None if it is missing or cannot be read."""
    try:
        return read_state(path)["val_loss"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def read_state(path: Path) -> dict:
    """Read state.json of a checkpoint. Raises UsageError if it is damaged."""
    return portable.read_json(path / STATE)


def saved_lora(checkpoint: Path) -> LoRA | None:
    """Return the settings of the adapters in a checkpoint; None if it has no adapters."""
    settings = read_state(checkpoint).get("lora")
    return settings and LoRA(**settings)


def saved_weights(checkpoint: Path) -> Mapping[str, Tensor]:
    """Return trained and frozen weights by name. Raises UsageError if a file is unreadable."""
    trained = portable.load_tensors(checkpoint / WEIGHTS)
    return with_base(run_of(checkpoint), trained, saved_lora(checkpoint))


def with_base(run: RunFolder, trained: Mapping, lora: LoRA | None) -> Mapping[str, Tensor]:
    """Return the trained weights; with adapters, also the frozen weights of the run."""
    if not lora:
        return trained
    return ChainMap(trained, portable.load_tensors(run.base / portable.WEIGHTS_FILE))


def run_of(checkpoint: Path) -> RunFolder:
    return RunFolder(checkpoint.resolve().parent.parent)
