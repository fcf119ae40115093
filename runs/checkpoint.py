"""Checkpoints on disk: all that the next step depends on, complete or not there at all.

A checkpoint is a folder checkpoints/step-N:

    weights.safetensors    name → fp32 weights (the master weights under DeepSpeed), without those
                           that are frozen: runs/base.py
    optimizer.safetensors  name.exp_avg and name.exp_avg_sq → AdamW's moments,
                           name.momentum_buffer → Muon's
    random.safetensors     per process, the state of its random generators and of its log line
    state.json             step, optimizer's step, loss scale, shape of the model, of its adapters
                           if it has any, and what a run that resumes must have in common
    manifest.json          size and SHA-256 of each of these files

Nothing in it depends on the engine or the number of processes, and nothing can execute.
"""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from common.atomic import whole_folder, write_whole
from formats.portable import TensorFile, read_json, save_tensors, write_json
from model.config import ConfigError, LMConfig
from model.lora import LoRA
from runs.base import base_damage, with_base
from runs.folder import RunFolder
from runs.manifest import damage_of_files, write_manifest

WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
RANDOM, STATE = "random.safetensors", "state.json"


def write_checkpoint(run: RunFolder, tensors: dict[str, dict[str, Tensor]], state: dict) -> int:
    """Write the checkpoint of state["step"], with WEIGHTS, OPTIMIZER and RANDOM → what that file
    holds, and let `latest` name it; returns its size in bytes. Raises OSError: the disk is full or
    refuses; what was there before still is."""
    path = run.checkpoint(state["step"])
    with whole_folder(path) as partial:
        for name, content in tensors.items():
            save_tensors(partial / name, content)
        write_json(partial / STATE, state)
        size = write_manifest(partial)
    write_whole(run.latest, path.name + "\n")
    return size


def space_warning(folder: Path, n_parameters: int, keep_last: int) -> str | None:
    """What to tell if the disk has too little room for a run's checkpoints; None if it has."""
    size = 12 * n_parameters  # weights and two moments in fp32
    count = max(keep_last, 1) + 2  # the best, and the one being written
    free = shutil.disk_usage(folder).free
    if free >= count * size:
        return None
    return (
        f"WARNING: {free / 1e9:.2f} GB free for {folder}, but {count} checkpoints of "
        f"{size / 1e9:.2f} GB may be there at once: make room, or lower --keep_last"
    )


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files by its manifest, or with the base that adapters are
    added to; None if it is sound."""
    try:
        if problem := damage_of_files(path, {WEIGHTS, OPTIMIZER, RANDOM, STATE}):
            return problem
        state = read_json(path / STATE)
        types = {"step": int, "identity": dict, "processes": int, "optimizer_step": int}
        for key, kind in types.items():
            if not isinstance(state[key], kind):
                return f"{STATE} says {key} is {state[key]!r}"
        if saved_lora(path):
            return base_damage(run_of(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def newest_sound(run: RunFolder) -> tuple[Path | None, dict[Path, str]]:
    """The run's newest checkpoint without `damage`, None if there is none, and what is wrong with
    those after it."""
    problems = {}
    for checkpoint in reversed(run.all_checkpoints()):
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint, problems
        problems[checkpoint] = problem
    return None, problems


def best(checkpoints: Iterable[Path]) -> Path | None:
    """The one that was saved at the lowest validation loss; None if none was at a validation."""
    losses = {path: loss for path in checkpoints if (loss := val_loss(path)) is not None}
    return min(losses, key=losses.get, default=None)


def val_loss(path: Path) -> float | None:
    """At the step of a checkpoint, sound or not; None where it was not saved at a validation."""
    try:
        return read_state(path)["val_loss"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def read_state(path: Path) -> dict:
    """A checkpoint's state.json; only of one without `damage`.

    The shape of the model stood among the parts of "identity" once, and AdamW was not named there
    when there was no other optimizer.
    """
    state = read_json(path / STATE)
    identity = {"optimizer": "adamw"} | state["identity"]
    if "model" not in state:
        fields = [name for name in LMConfig.__dataclass_fields__ if name in identity]
        state["model"] = {name: identity.pop(name) for name in fields}
    return state | {"identity": identity}


def saved_config(checkpoint: Path) -> LMConfig:
    """The shape of the model in a sound checkpoint. Raises ConfigError: no shape that can be
    built."""
    try:
        shape = read_state(checkpoint)["model"]
        if not isinstance(shape, dict):
            raise ConfigError(f"the model is {shape!r}")
        return LMConfig.from_dict(shape)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint / STATE}: {error}") from error


def saved_lora(checkpoint: Path) -> LoRA | None:
    """The adapters of the model in a checkpoint. Raises TypeError: other settings than theirs."""
    settings = read_state(checkpoint).get("lora")
    return settings and LoRA(**settings)


def saved_weights(checkpoint: Path) -> Mapping[str, Tensor]:
    """All parameters by name, read when they are asked for, with adapters apart from their base.
    Raises OSError, SafetensorError: a file that cannot be read."""
    trained = TensorFile(checkpoint / WEIGHTS)
    return with_base(run_of(checkpoint), trained, saved_lora(checkpoint))


def run_of(checkpoint: Path) -> RunFolder:
    return RunFolder(checkpoint.resolve().parent.parent)
