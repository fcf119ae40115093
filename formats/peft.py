"""Write and read LoRA adapters in the format of the package `peft`.

In PEFT, the base model is a folder that scripts.export_hf wrote. For wq and wk, the rows of B are
reordered like the rows of the weights in formats/hugging_face.py.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from formats.hugging_face import llama_name, our_name, our_rows, to_llama
from formats.portable import (
    WeightsError,
    load_tensors,
    read_json,
    require_tensor,
    save_tensors,
    without_memory,
    write_json,
)
from model.config import LMConfig
from model.lora import LoRA

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT puts this prefix before the names of weights
FACTORS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}  # ends of names: ours → PEFT's
READABLE = {  # this model cannot compute adapters with other values
    "peft_type": ("LORA",),
    "fan_in_fan_out": (False,),
    "alpha_pattern": ({},),
    "init_lora_weights": (True, False, "gaussian"),  # other values change the base model
}


def save_adapter(folder: Path, config: LMConfig, weights: dict[str, Tensor], lora: LoRA) -> None:
    """Write the trained parameters: adapters, and whole matrices as PEFT's modules_to_save."""
    tensors, adapted, whole = {}, {}, {}  # the last two are ordered sets of module names
    for name, tensor in weights.items():
        layer, _, kind = name.rpartition(".")
        theirs = llama_name(f"{layer}.weight").removesuffix(".weight")
        if kind != "lora_a":
            (tensor,) = to_llama(config, {f"{layer}.weight": tensor}).values()
        (whole if kind == "weight" else adapted)[theirs] = None
        tensors[f"{PREFIX}{theirs}.{FACTORS.get(kind, kind)}"] = tensor
    if "tok_embeddings.weight" in weights and config.tie_embeddings:  # PEFT would untie them
        whole["lm_head"] = None
        tensors[f"{PREFIX}lm_head.weight"] = weights["tok_embeddings.weight"].clone()
    save_tensors(folder / ADAPTER_WEIGHTS, tensors)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.dim,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(adapted),
        "modules_to_save": list(whole) or None,
        "inference_mode": True,
    }
    write_json(folder / ADAPTER_CONFIG, settings)


def load_adapter(folder: Path, config: LMConfig) -> tuple[dict[str, Tensor], float]:
    """Return the trained weights by our names, and the scaling for `model.lora.Merged`.
    Raises WeightsError if a file is missing or damaged, if the adapter does not fit a model of this
    `config`, or if this project cannot compute this kind of adapter."""
    settings = read_json(folder / ADAPTER_CONFIG)
    for name, allowed in READABLE.items():
        if (value := settings.get(name)) is not None and value not in allowed:
            raise WeightsError(f"{folder}: {name} is {value!r}, only plain LoRA can be read")
    try:
        rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
        scaling = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise WeightsError(f"{folder}: r or lora_alpha missing or invalid ({error!r})") from error
    weights = _our_weights(load_tensors(folder / ADAPTER_WEIGHTS), str(folder))
    require_adapter(weights, config, rank, str(folder))
    for name, tensor in weights.items():
        if not name.endswith("lora_a"):
            weights[name] = our_rows(config, name, tensor)
    if config.tie_embeddings and "output.weight" in weights:
        embedding = weights.get("tok_embeddings.weight")
        if embedding is None or not torch.equal(weights.pop("output.weight"), embedding):
            raise WeightsError(f"{folder}: output layer and embedding were trained separately")
    return weights, scaling


def _our_weights(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Rename PEFT's tensors to our names. The rows stay in PEFT's order."""
    kinds = {theirs: ours for ours, theirs in FACTORS.items()}
    weights = {}
    for name, tensor in tensors.items():
        theirs = name.removeprefix(PREFIX)
        kind = next((kind for kind in kinds if theirs.endswith(f".{kind}")), "weight")
        ours = our_name(f"{theirs.removesuffix(kind)}weight", source)
        weights[f"{ours.removesuffix('weight')}{kinds.get(kind, kind)}"] = tensor
    return weights


def require_adapter(weights: dict[str, Tensor], config: LMConfig, rank: int, source: str) -> None:
    """Raise WeightsError if a tensor has a wrong shape, or if lora_a or lora_b is missing."""
    shapes = {name: tuple(p.shape) for name, p in without_memory(config).named_parameters()}
    shapes.setdefault("output.weight", shapes["tok_embeddings.weight"])
    for name, tensor in sorted(weights.items()):
        layer, _, kind = name.rpartition(".")
        other = {"lora_a": "lora_b", "lora_b": "lora_a"}.get(kind, kind)
        if f"{layer}.{other}" not in weights:
            raise WeightsError(f"{source}: {layer}.{other} is missing")
        shape = shapes.get(f"{layer}.weight", ())
        expected = {"lora_a": (rank, *shape[1:]), "lora_b": (*shape[:1], rank)}.get(kind, shape)
        require_tensor(name, tensor, expected, source)
