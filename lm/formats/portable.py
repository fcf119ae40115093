"""Portable weights: a folder with model.safetensors (fp32) and config.json."""

import errno
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm.common.errors import UsageError, reason
from model.config import ConfigError, LMConfig
from model.lora import is_adapter
from model.transformer import Transformer

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"  # names end tokens, in imported folders too
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def save_portable(folder: Path, config: LMConfig, weights: dict[str, Tensor]) -> None:
    """Write config and weights. `weights` holds a tied matrix once, under one name."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / WEIGHTS_FILE, weights)
    write_json(folder / CONFIG_FILE, config.to_dict())


def write_json(path: Path, values: dict) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict:
    """Read a JSON object. Raises UsageError if the file does not hold one."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path.parent}: no readable {path.name} ({reason(error)})") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: not a JSON object")
    return values


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Call `save_file` of safetensors, and turn its errors into OSError."""
    path.touch()
    mode = path.stat().st_mode  # save_file sets permissions that let only the owner read
    try:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, path, metadata={"format": "pt"})
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
    with suppress(OSError):  # a mounted bucket or share may refuse it
        path.chmod(mode)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or a file of torch.save; code in it is not run. Raises UsageError
    if the file is missing or damaged. torch.save allows values that are not tensors."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return dict(torch.load(path, "cpu", weights_only=True))
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path}: no readable weights ({reason(error)})") from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise UsageError(f"{path}: not a state dict, or holds code, which is not run") from error


def load_config(folder: Path) -> LMConfig:
    """Read config.json of a folder. Raises UsageError if it is missing or damaged."""
    path = folder / CONFIG_FILE
    return build_config(read_json(path), path)


def has_setting(name: str, folder: Path) -> bool:
    """Return True for a folder whose CONFIG_FILE has this setting."""
    return (folder / CONFIG_FILE).exists() and name in read_json(folder / CONFIG_FILE)


def end_ids(folder: Path) -> set[int]:
    """Return the end tokens that a folder's GENERATION_FILE and CONFIG_FILE name: an id or a list
    in each. Raises UsageError if a file is damaged."""
    found = []
    for name in (GENERATION_FILE, CONFIG_FILE):
        given = read_json(folder / name).get("eos_token_id") if (folder / name).exists() else None
        found += given if isinstance(given, list) else [given]
    return {id for id in found if type(id) is int}


def build_config(values: dict, source: Path) -> LMConfig:
    """Build a config. Raises UsageError, which names `source`, if the values are invalid."""
    try:
        return LMConfig.from_dict(values)
    except ConfigError as error:
        raise UsageError(f"{source}: {error}") from error


def load_portable(folder: Path) -> Transformer:
    """Load the model of a folder. Raises UsageError if a file is missing or damaged."""
    return from_weights(load_config(folder), load_tensors(folder / WEIGHTS_FILE), str(folder))


def from_weights(config: LMConfig, weights: Mapping[str, Tensor], source: str) -> Transformer:
    """Build a model on the CPU, in fp32. Raises UsageError if the weights do not fit."""
    require_fit(without_memory(config), weights, source)  # a damaged config could fill memory
    model = Transformer(config)
    model.load_state_dict(weights, strict=False)  # the names of a tied matrix may be one or two
    return model.eval()


def without_memory(config: LMConfig) -> Transformer:
    """Build a model whose parameters have shapes but no values."""
    with torch.device("meta"):
        return Transformer(config)


def require_fit(model: Transformer, weights: Mapping[str, Tensor], source: str) -> None:
    """Raise UsageError if names or shapes differ, or a weight is not finite floating point.
    Weights that contain no adapter also fit a model with adapters."""
    parameters = dict(model.named_parameters())
    names = set(weights)
    if not any(map(is_adapter, names)):
        parameters = {name: p for name, p in parameters.items() if not is_adapter(name)}
    if model.config.tie_embeddings:
        names.discard("output.weight")  # the same matrix as tok_embeddings.weight
    for name in sorted(parameters.keys() ^ names):
        wrong = "missing" if name in parameters else "not in this model"
        raise UsageError(f"{source}: {name} is {wrong}")
    for name, parameter in parameters.items():
        tensor, shape = weights[name], tuple(parameter.shape)
        if (given := tuple(tensor.shape)) != shape:
            raise UsageError(f"{source}: {name} has shape {given}, the model needs {shape}")
        if tensor.dtype not in FLOATS or not tensor.isfinite().all():
            wrong = "contains NaN or infinity, or is not floating point of 16 bits or more"
            raise UsageError(f"{source}: {name} {wrong}")
