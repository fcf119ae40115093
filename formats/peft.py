"""Adapters as the package `peft` reads them onto an exported base, and as it writes them.

An adapter's B has the rows of the weight that it is added to, so those of wq and wk lie in exports
where these lie (see formats/hugging_face_names.py); A has its columns, which are the same.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from formats.hugging_face_names import llama_name, our_names, our_rotation, to_llama
from formats.portable import read_json, save_tensors, write_json
from model.config import ConfigError, LMConfig
from model.lora import LoRA
from model.transformer import Transformer

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # before the names in the base
# Ours → PEFT's, behind the name of a layer.
FACTORS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
# What other values would mean is not computed here; what else PEFT can has tensors of its own.
READABLE = {
    "peft_type": ("LORA",),
    "fan_in_fan_out": (False,),
    "alpha_pattern": ({},),
    "init_lora_weights": (True, False, "gaussian"),  # others change the base
}


def save_adapter(folder: Path, config: LMConfig, weights: dict[str, Tensor], lora: LoRA) -> None:
    """Write the folder: adapters, and what else was trained, as "modules to save". Raises OSError:
    the disk is full or refuses.

    Args:
        weights: of what was trained, by name; see `add_lora`.
    """
    tensors, adapted, whole = {}, {}, {}  # the last two are used for their order
    for name, tensor in weights.items():
        layer, _, kind = name.rpartition(".")
        theirs = llama_name(f"{layer}.weight").removesuffix(".weight")
        if kind != "lora_a":
            (tensor,) = to_llama(config, {f"{layer}.weight": tensor}).values()
        (whole if kind == "weight" else adapted)[theirs] = None
        tensors[f"{PREFIX}{theirs}.{FACTORS.get(kind, kind)}"] = tensor
    if "tok_embeddings.weight" in weights and config.tie_embeddings:  # PEFT unties what it saves
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
    """What was trained, by our names, and the adapters' scaling: see `model.lora.Merged`.

    Args:
        config: shape of the base.

    Raises ConfigError: files missing or damaged, an adapter for a model of another shape, or one
        that is more than LoRA.
    """
    settings = read_json(folder / ADAPTER_CONFIG)
    for name, allowed in READABLE.items():
        if (value := settings.get(name)) is not None and value not in allowed:
            raise ConfigError(f"{folder}: {name} is {value!r}, only plain LoRA can be read")
    try:
        rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
        scaling = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{folder}: no r and lora_alpha of an adapter ({error!r})") from error
    try:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{folder}: no readable adapter ({error})") from error
    weights = _our_weights(tensors, str(folder))
    require_adapter(weights, config, rank, str(folder))
    with_rows = {name: tensor for name, tensor in weights.items() if not name.endswith("lora_a")}
    weights |= our_rotation(config, with_rows)
    if config.tie_embeddings and "output.weight" in weights:
        embedding = weights.get("tok_embeddings.weight")
        if embedding is None or not torch.equal(weights.pop("output.weight"), embedding):
            raise ConfigError(f"{folder}: trained the output layer apart from the embedding")
    return weights, scaling


def _our_weights(tensors: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """By our names; rows still lie as they did."""
    kinds = {theirs: ours for ours, theirs in FACTORS.items()}
    weights = {}
    for name, tensor in tensors.items():
        theirs = name.removeprefix(PREFIX)
        kind = next((kind for kind in kinds if theirs.endswith(f".{kind}")), "weight")
        try:
            (ours,) = our_names({f"{theirs.removesuffix(kind)}weight": tensor})
        except ConfigError as error:
            raise ConfigError(f"{source}: {name} is in no Llama with LoRA") from error
        weights[f"{ours.removesuffix('weight')}{kinds.get(kind, kind)}"] = tensor
    return weights


def require_adapter(weights: dict[str, Tensor], config: LMConfig, rank: int, source: str) -> None:
    """Raises ConfigError: a tensor is of no layer of such a model, has another shape than its layer
    asks for, or holds no numbers; or a factor lacks the other."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(config).named_parameters()}
    shapes.setdefault("output.weight", shapes["tok_embeddings.weight"])
    for name, tensor in sorted(weights.items()):
        layer, _, kind = name.rpartition(".")
        if f"{layer}.weight" not in shapes:
            raise ConfigError(f"{source}: {name} is not in this model")
        expected = tuple(shapes[f"{layer}.weight"])
        if kind != "weight":
            expected = (rank, expected[-1]) if kind == "lora_a" else (expected[0], rank)
            other = f"{layer}.{'lora_b' if kind == 'lora_a' else 'lora_a'}"
            if other not in weights:
                raise ConfigError(f"{source}: {other} is missing")
        if (given := tuple(tensor.shape)) != expected:
            raise ConfigError(f"{source}: {name} is {given}, this model needs {expected}")
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ConfigError(f"{source}: {name} holds NaN, infinity or no floating point numbers")
