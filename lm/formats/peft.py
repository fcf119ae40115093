"""Write LoRA adapters in the format of the package `peft`.

PEFT loads the adapters onto the run's initial weights (folder base/), exported by export_hf.
The rows of lora_b are reordered for wq and wk, as weights are in lm/formats/weight_layout.py.
"""

from pathlib import Path

from torch import Tensor

from lm.formats.portable import save_tensors, write_json
from lm.formats.weight_layout import OUR_ORDER, reordered, their_name
from model.config import LMConfig
from model.lora import LoRA

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT puts this prefix before the names of weights
FACTORS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}  # ends of names: ours → PEFT's


def save_adapter(folder: Path, config: LMConfig, weights: dict[str, Tensor], lora: LoRA) -> None:
    """Write the trained parameters: adapters, and whole weights as PEFT's modules_to_save."""
    tensors, adapted, whole = {}, {}, {}  # the last two are ordered sets of module names
    for name, tensor in weights.items():
        layer, _, part = name.rpartition(".")
        theirs = their_name(layer).removesuffix(".weight")
        if part != "lora_a":
            tensor = reordered(config, name, tensor, OUR_ORDER)
        (whole if part == "weight" else adapted)[theirs] = None
        tensors[f"{PREFIX}{theirs}.{FACTORS.get(part, part)}"] = tensor
    if "tok_embeddings.weight" in weights and config.tie_embeddings:  # PEFT copies it for lm_head
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
