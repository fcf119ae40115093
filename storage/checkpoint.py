"""Checkpoints on disk, in checkpoints/step-N: all that the next step depends on, or nothing at all.

    weights.safetensors    name → fp32 weights (the master weights under DeepSpeed)
    optimizer.safetensors  name.exp_avg and name.exp_avg_sq → AdamW's moments,
                           name.momentum_buffer → Muon's
    random.safetensors     per process, the state of its random generators and of its log line
    state.json             step, loss scale, shapes of model and adapters, and what a run that
                           resumes must have in common
    manifest.json          size and SHA-256 of each of these files, by which damage is found

Nothing in it depends on the engine or the number of processes, and nothing can execute. The frozen
weights of a run with adapters are in the folder base/ of the run: portable weights with a tokenizer
and a manifest.
"""

import hashlib
from collections import ChainMap
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from common.atomic import whole_folder, write_whole
from common.errors import UsageError
from data.tokenizer import copy_tokenizer
from formats.portable import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    WeightsError,
    load_tensors,
    read_json,
    save_portable,
    save_tensors,
    write_json,
)
from model.config import LMConfig
from model.lora import LoRA
from storage.folder import RunFolder

WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
RANDOM, STATE = "random.safetensors", "state.json"
MANIFEST = "manifest.json"


def write_checkpoint(run: RunFolder, tensors: dict[str, dict[str, Tensor]], state: dict) -> int:
    """Write the checkpoint of state["step"], with the tensors of each file by its name, and make
    `latest` name it; return its size in bytes."""
    path = run.checkpoint(state["step"])
    with whole_folder(path) as partial:
        for name, content in tensors.items():
            save_tensors(partial / name, content)
        write_json(partial / STATE, state)
        size = _write_manifest(partial)
    write_whole(run.latest, path.name + "\n")
    return size


def write_base(
    run: RunFolder, config: LMConfig, weights: dict[str, Tensor], tokenizer: Path
) -> None:
    """Keep the weights that adapters begin with. Raises UsageError: it cannot be written."""
    try:
        with whole_folder(run.base) as folder:
            save_portable(folder, config, weights)
            _write_manifest(folder)
            copy_tokenizer(tokenizer, folder)
    except OSError as error:
        raise UsageError(f"{run.base} cannot be written: {error.strerror}") from error


def _write_manifest(folder: Path) -> int:
    """Record size and SHA-256 of the folder's files; return their size in bytes."""
    files = {file.name: _facts_of(file) for file in sorted(folder.iterdir())}
    write_json(folder / MANIFEST, {"files": files})
    return sum(file["size"] for file in files.values())


def _facts_of(path: Path) -> dict:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def damage(path: Path) -> str | None:
    """Say what is wrong with a checkpoint or the base of its adapters; None if nothing is."""
    try:
        _compare(path, {WEIGHTS, OPTIMIZER, RANDOM, STATE})
        if saved_lora(path):
            _compare(run_of(path).base, {CONFIG_FILE, WEIGHTS_FILE})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        kind = "" if isinstance(error, WeightsError) else f"{type(error).__name__}: "
        return f"{kind}{error}"
    return None


def _compare(folder: Path, names: set[str]) -> None:
    """Raise some error where a folder differs from its manifest, which must name these files."""
    files = read_json(folder / MANIFEST)["files"]
    if files.keys() != names:
        raise WeightsError(f"{MANIFEST} names other files")
    for name, facts in files.items():
        if _facts_of(folder / name) != facts:
            raise WeightsError(f"the checksum of {name} is wrong")


def newest_sound(run: RunFolder) -> tuple[Path | None, dict[Path, str]]:
    """Return the run's newest sound checkpoint or None, and the damage of each newer one."""
    problems = {}
    for checkpoint in reversed(run.all_checkpoints()):
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint, problems
        problems[checkpoint] = problem
    return None, problems


def best(checkpoints: Iterable[Path]) -> Path | None:
    """Return the checkpoint with the lowest validation loss; None if none has one."""
    losses = {path: loss for path in checkpoints if (loss := val_loss(path)) is not None}
    return min(losses, key=losses.get, default=None)


def val_loss(path: Path) -> float | None:
    """Return the validation loss at a checkpoint, sound or not; None if it has none."""
    try:
        return read_state(path)["val_loss"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def read_state(path: Path) -> dict:
    """Read state.json of a sound checkpoint."""
    state = read_json(path / STATE)
    identity = {"optimizer": "adamw"} | state["identity"]  # which older ones do not name
    if "model" not in state:  # older ones have its shape in "identity"
        fields = [name for name in LMConfig.__dataclass_fields__ if name in identity]
        state["model"] = {name: identity.pop(name) for name in fields}
    return state | {"identity": identity}


def saved_lora(checkpoint: Path) -> LoRA | None:
    """Return the adapters' settings in a checkpoint, None without adapters."""
    settings = read_state(checkpoint).get("lora")
    return settings and LoRA(**settings)


def saved_weights(checkpoint: Path) -> Mapping[str, Tensor]:
    """Return all parameters by name, adapters apart. Raises ConfigError: damaged."""
    trained = load_tensors(checkpoint / WEIGHTS)
    return with_base(run_of(checkpoint), trained, saved_lora(checkpoint))


def with_base(
    run: RunFolder, trained: Mapping[str, Tensor], lora: LoRA | None
) -> Mapping[str, Tensor]:
    """Add the run's base to trained weights with adapters."""
    return ChainMap(trained, load_tensors(run.base / WEIGHTS_FILE)) if lora else trained


def run_of(checkpoint: Path) -> RunFolder:
    return RunFolder(checkpoint.resolve().parent.parent)
