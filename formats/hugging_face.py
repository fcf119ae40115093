"""Convert a model to Hugging Face's Llama or Qwen3 and back: weights and tokenizer. For the
settings see formats/config_json.py.

Rotary embedding rotates pairs of channels of a head. Here, as in Llama's own release, a pair is
(0, 1), (2, 3), …; in Hugging Face's Llama it is (j, j + head_dim/2). The rows of wq and wk, which
compute these channels, and the weights of their norms are therefore reordered. All other weights
are equal.
"""

import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UsageError
from data.chat_template import JINJA
from data.tokenizer import TOKENIZER_FILE, TOKENIZER_JSON, JsonTokenizer, Tokenizer, read_markers
from formats.config_json import llama_config, read_llama_config
from formats.portable import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    WeightsError,
    load_tensors,
    read_json,
    save_tensors,
    write_json,
)
from formats.tokenizer_json import convert, without_escapes
from model.config import LMConfig
from model.transformer import Transformer

# Names of weights: ours (as in Llama's own release) → Hugging Face's.
OUTER = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.router": "mlp.gate",
}


def reordered(weight: Tensor, *order: int) -> Tensor:
    """Reorder rows of wq or wk, (heads · head_dim, dim), or weights of a norm, (head_dim,). Our
    order is (heads, head_dim/2, 2), theirs (heads, 2, head_dim/2). `order` is that of `weight`; the
    result has the other one."""
    return weight.unflatten(0, order).transpose(1, 2).reshape_as(weight)


def rotated_heads(name: str, config: LMConfig) -> int | None:
    """Return the number of heads of a wq or wk; 1 for their norms, whose weights all heads share;
    None for the names of other weights."""
    heads = {"wq": config.n_heads, "wk": config.n_kv_heads, "q_norm": 1, "k_norm": 1}
    return heads.get(name.split(".")[-2])


def to_llama(config: LMConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights to Hugging Face's names, where each expert has its own matrices, and reorder
    the rows of wq and wk."""
    renamed = {}
    for name, weight in weights.items():
        theirs = llama_name(name)
        if weight.dim() == 3:  # (experts, rows, cols)
            for i, matrix in enumerate(weight):
                renamed[theirs.replace("mlp.", f"mlp.experts.{i}.")] = matrix
        else:
            renamed[theirs] = their_rows(config, name, weight)
    return renamed


def their_rows(config: LMConfig, name: str, weight: Tensor) -> Tensor:
    """Return our weight with rows in Hugging Face's order. `name` is our name of the weight."""
    heads = rotated_heads(name, config)
    return reordered(weight, heads, -1, 2) if heads else weight


def llama_name(name: str) -> str:
    """Return Hugging Face's name of a weight."""
    if layer := re.fullmatch(r"layers\.(\d+)\.(.+?)(\.weight)?", name):
        return f"model.layers.{layer[1]}.{IN_LAYER[layer[2]]}.weight"
    return OUTER[name]


def our_name(name: str, source: str) -> str:
    """Return our name for Hugging Face's `name`. Raises WeightsError if there is none."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\..+\.weight", name)
    candidates = [*OUTER, *(f"layers.{layer[1]}.{inner}.weight" for inner in IN_LAYER if layer)]
    for ours in candidates:
        if llama_name(ours) == name:
            return ours
    raise WeightsError(f"{source}: {name} has no counterpart in this model")


def is_learned(name: str) -> bool:
    """Return False for tables of positions and masks, which some programs save with the weights."""
    return name.endswith((".weight", ".bias"))


EXPERT = re.compile(r"\.(shared_)?experts\.(\d+)")  # in names of an expert's matrices


def inert_weights(config: LMConfig) -> dict[str, Tensor]:
    """Return an empty shared expert's weights for each layer of a Qwen2-MoE, {} for others."""
    shapes = {"_gate": (1, config.dim), ".gate_proj": (0, config.dim)}
    shapes |= {".up_proj": (0, config.dim), ".down_proj": (config.dim, 0)}
    layers = range(config.n_layers if config.use_moe and not config.qk_norm else 0)
    return {
        f"model.layers.{i}.mlp.shared_expert{name}.weight": torch.zeros(shape)
        for i in layers
        for name, shape in shapes.items()
    }


def our_rows(config: LMConfig, name: str, weight: Tensor) -> Tensor:
    """Return Hugging Face's weight with rows in our order. `name` is our name of the weight."""
    heads = rotated_heads(name, config)
    fits = heads and weight.shape[:1] == (heads * config.head_dim,)
    return reordered(weight, heads, 2, -1) if fits else weight


def our_weights(weights: Iterable[tuple[str, Tensor]], source: str) -> dict[str, Tensor]:
    """Return Hugging Face's weights with our names; the matrices of experts are stacked. Raises
    WeightsError if a weight has no counterpart in this model."""
    renamed, stacks = {}, defaultdict(dict)
    for name, weight in weights:
        if not isinstance(weight, Tensor):
            raise WeightsError(f"{source}: {name} is not a tensor")
        is_inert = not weight.numel() or name.endswith("shared_expert_gate.weight")
        if not is_learned(name) or is_inert:
            continue
        ours = our_name(EXPERT.sub("", name), source)
        if expert := EXPERT.search(name):  # shared experts follow the routed ones
            stacks[ours.removesuffix(".weight")][bool(expert[1]), int(expert[2])] = weight
        else:
            renamed[re.sub(r"router\.weight$", "router", ours)] = weight
    for name, stack in stacks.items():
        renamed[name] = torch.stack([stack[number] for number in sorted(stack)])
    return renamed


def read_llama_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face folder with our names and our order of rows."""
    config = read_llama_config(folder)
    parts = sorted(folder.glob("model-*-of-*.safetensors")) or [folder / WEIGHTS_FILE]
    if not parts[0].exists():  # as older versions of transformers, and MiniMind, write it
        parts = sorted(folder.glob("pytorch_model*.bin")) or parts
    found = our_weights(chain(*(load_tensors(part).items() for part in parts)), str(folder))
    weights = {name: our_rows(config, name, weight) for name, weight in found.items()}
    output = weights.get("output.weight") if config.tie_embeddings else None
    if output is not None and not torch.equal(output, weights.get("tok_embeddings.weight", output)):
        raise WeightsError(f"{folder}: config.json ties the embeddings, but lm_head differs")
    return weights


MARK = "exported_by"  # this key in config.json allows --overwrite to replace the folder


def is_export(folder: Path) -> bool:
    """Return True for a folder that scripts.export_hf wrote."""
    return (folder / CONFIG_FILE).exists() and MARK in read_json(folder / CONFIG_FILE)


def write_model(folder: Path, model: Transformer, tokenizer: Tokenizer, dtype: str) -> None:
    """Write weights and settings. Raises UsageError for shared experts or overflowing weights."""
    config = model.config
    if config.n_shared_experts:
        raise UsageError("transformers has no Llama with shared experts: no export is possible")
    kind = getattr(torch, dtype)
    weights = {key: p.detach().to(kind) for key, p in model.named_parameters()}
    for key, weight in weights.items():
        if not weight.isfinite().all():
            raise UsageError(f"{key} does not fit into {dtype}: pass --dtype float32")
    inert = {key: weight.to(kind) for key, weight in inert_weights(config).items()}
    save_tensors(folder / WEIGHTS_FILE, to_llama(config, weights) | inert)
    values = llama_config(config, dtype, tokenizer.bos_id, tokenizer.eos_id)
    write_json(folder / CONFIG_FILE, values | {MARK: "scripts.export_hf"})
    generation = {name: values[name] for name in ("bos_token_id", "eos_token_id")}
    write_json(folder / "generation_config.json", generation)


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_seq_len: int, *, chat: bool) -> None:
    """Write tokenizer.json and its settings for transformers. `chat` adds the chat template.
    Raises UsageError if no tokenizer.json can give equal ids."""
    if isinstance(tokenizer, JsonTokenizer):
        content = Path(tokenizer.path).read_text(encoding="utf-8")
        written = without_escapes(content) if chat else content
        (folder / TOKENIZER_JSON).write_text(written, encoding="utf-8")
        markers = read_markers(tokenizer.path)
    else:
        converted = convert(tokenizer, chat)
        converted.save(str(folder / TOKENIZER_JSON))
        shutil.copyfile(tokenizer.path, folder / TOKENIZER_FILE)
        markers = {
            "bos_token": converted.id_to_token(tokenizer.bos_id),
            "eos_token": converted.id_to_token(tokenizer.eos_id),
            "unk_token": converted.model.unk_token,
        }
    write_json(folder / "special_tokens_map.json", markers)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json unchanged
        "model_max_length": max_seq_len,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        # Without a template, "<s>" is plain text. With one, JINJA escapes a "<s>" inside a message.
        "split_special_tokens": not chat,
    }
    if chat:
        settings["chat_template"] = JINJA
    elif tokenizer.chat_template:
        settings |= {"split_special_tokens": False, "chat_template": tokenizer.chat_template.source}
    write_json(folder / "tokenizer_config.json", markers | settings)
