"""This model as Hugging Face's Llama: names of weights, rotation of positions, settings, tokenizer.

The arithmetic differs in one thing. Rotary embedding turns pairs of a head's channels: here, as in
Llama's own release, neighbours (0, 1), (2, 3), …; there channel j with j + head_dim/2. So the rows
of wq and wk, which make those channels, change places. Nothing else is reordered: the product of
queries and keys does not depend on the order of channels.
"""

import re
import shutil
from collections import ChainMap
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UsageError
from data.chat_template import JINJA
from data.tokenizer import TOKENIZER_FILE, TOKENIZER_JSON, JsonTokenizer, Tokenizer, read_markers
from formats.portable import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    load_tensors,
    read_json,
    save_tensors,
    write_json,
)
from formats.tokenizer_json import convert, without_escapes
from model.config import ConfigError, LMConfig, RopeScaling
from model.transformer import Transformer

# Ours (Llama's own release) → Hugging Face's.
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
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def split_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of wq or wk, (heads · head_dim, dim), from neighbouring pairs to the first
    and the second half of each head."""
    rows = weight.unflatten(0, (heads, -1, 2))  # (heads, head_dim/2, 2, dim)
    return rows.transpose(1, 2).reshape_as(weight)


def join_halves(weight: Tensor, heads: int) -> Tensor:
    """Undo `split_halves`."""
    rows = weight.unflatten(0, (heads, 2, -1))  # (heads, 2, head_dim/2, dim)
    return rows.transpose(1, 2).reshape_as(weight)


def rotated_heads(name: str, config: LMConfig) -> int | None:
    """Return the number of heads of wq or wk by its name (ours); None for any other weight."""
    return {"wq": config.n_heads, "wk": config.n_kv_heads}.get(name.split(".")[-2])


def to_llama(config: LMConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights (a tied matrix once) to Hugging Face's names, with wq and wk reordered."""
    heads = {name: rotated_heads(name, config) for name in weights}
    return {
        llama_name(name): split_halves(weight, heads[name]) if heads[name] else weight
        for name, weight in weights.items()
    }


def llama_name(name: str) -> str:
    """Turn our name of a weight into Hugging Face's."""
    if layer := re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name):
        return f"model.layers.{layer[1]}.{IN_LAYER[layer[2]]}.weight"
    return OUTER[name]


def our_name(name: str, source: str) -> str:
    """Turn Hugging Face's name of a weight into ours. Raises ConfigError: no Llama has it."""
    outer = {theirs: ours for ours, theirs in OUTER.items()}
    in_layer = {theirs: ours for ours, theirs in IN_LAYER.items()}
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if layer and layer[2] in in_layer:
        return f"layers.{layer[1]}.{in_layer[layer[2]]}.weight"
    if name not in outer:
        raise ConfigError(f"{source}: {name} is in no Llama")
    return outer[name]


def is_learned(name: str) -> bool:
    """Return False for tables of positions and masks, which some save beside the weights."""
    return name.endswith((".weight", ".bias"))


def our_rows(config: LMConfig, name: str, weight: Tensor) -> Tensor:
    """Return one of Hugging Face's weights, by our name, with its rows in our order. A weight of
    the wrong shape stays as it is."""
    heads = rotated_heads(name, config)
    if heads and weight.shape[:1] == (heads * config.head_dim,):
        return join_halves(weight, heads)
    return weight


# Our names → Hugging Face's, where rope_type is "llama3".
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}


def llama_config(config: LMConfig, dtype: str, bos_id: int, eos_id: int) -> dict:
    """Return config.json for transformers. Rotary settings and the dtype stand in it twice: where
    version 5 looks for them, and where version 4 does."""
    rope = {"rope_type": "default"}
    if scaling := config.rope_scaling:
        rope = {theirs: getattr(scaling, ours) for ours, theirs in SCALING.items()}
        rope["rope_type"] = "llama3"
    rope["rope_theta"] = config.rope_theta
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "rope_scaling": rope if config.rope_scaling else None,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


# Settings of Hugging Face's Llama, and the values that can be computed here; the first is assumed.
COMPUTED = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
    "rope_type": ("default", "llama3"),
}


def read_llama_config(folder: Path) -> LMConfig:
    """Undo `llama_config`; missing settings have the defaults of transformers' LlamaConfig. Raises
    ConfigError: none, or something that this model cannot compute; names setting and value."""
    values = read_json(folder / CONFIG_FILE)
    if (kind := values.get("model_type")) != "llama":
        raise ConfigError(f"{folder}: model_type is {kind!r}, only 'llama' can be read")
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    for name, allowed in COMPUTED.items():
        value = (values | {"rope_type": rope_type}).get(name, allowed[0])
        if value not in allowed:
            raise ConfigError(f"{folder}: {name} is {value!r}, which cannot be computed here")
    scaling = None
    if rope_type == "llama3":
        scaling = RopeScaling(**{ours: rope.get(theirs) for ours, theirs in SCALING.items()})
    n_heads = values.get("num_attention_heads")
    return LMConfig(
        dim=values.get("hidden_size"),
        n_layers=values.get("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=values.get("num_key_value_heads") or n_heads,
        vocab_size=values.get("vocab_size"),
        head_dim=values.get("head_dim"),
        hidden_dim=values.get("intermediate_size", 11008),
        norm_eps=values.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or values.get("rope_theta", 10000.0),
        rope_scaling=scaling,
        max_seq_len=values.get("max_position_embeddings", 2048),
        tie_embeddings=values.get("tie_word_embeddings", False),
    )


class LlamaTensors(Mapping):
    """The weights of a Hugging Face folder, in safetensors, by our names and with our rows.

    Each is read when it is asked for, in the precision of the file. Raises ConfigError: no Llama,
    or a file that is missing or damaged.
    """

    def __init__(self, folder: Path):
        self._config = read_llama_config(folder)
        parts = sorted(folder.glob("model-*-of-*.safetensors")) or [folder / WEIGHTS_FILE]
        self._weights = ChainMap(*map(load_tensors, parts))
        names = (name for name in self._weights if is_learned(name))
        self._theirs = {our_name(name, str(folder)): name for name in names}

    def __getitem__(self, name: str) -> Tensor:
        return our_rows(self._config, name, self._weights[self._theirs[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._theirs)

    def __len__(self) -> int:
        return len(self._theirs)


MARK = "exported_by"  # in config.json: what may be replaced with --overwrite
CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A Llama of {millions:.2f} million parameters with a context of {max_seq_len:,} tokens, in {dtype}.

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("{name}")
    tokenizer = AutoTokenizer.from_pretrained("{name}")
    inputs = {inputs}
    ids = model.generate(**inputs, max_new_tokens=50)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))
"""
TEXT_INPUTS = 'tokenizer("Once upon a time", return_tensors="pt")'
CHAT_INPUTS = """tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is a list?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )"""


def is_export(folder: Path) -> bool:
    """Return True for a folder that scripts.export_hf wrote."""
    config = folder / CONFIG_FILE
    return config.exists() and MARK in read_json(config)


def write_model(
    folder: Path, model: Transformer, tokenizer: Tokenizer, *, dtype: str, name: str, chat: bool
) -> None:
    """Write weights in `dtype`, config and generation settings with the tokenizer's markers, and a
    model card, which says whether the model answers (`chat`). Raises UsageError: a weight is too
    large for `dtype`. OSError: the disk is full or refuses."""
    config = model.config
    kind = getattr(torch, dtype)
    weights = {key: p.detach().to(kind) for key, p in model.named_parameters()}
    for key, weight in weights.items():
        if not weight.isfinite().all():
            raise UsageError(f"{key} does not fit into {dtype}: --dtype float32 keeps it exactly")
    save_tensors(folder / WEIGHTS_FILE, to_llama(config, weights))
    values = llama_config(config, dtype, tokenizer.bos_id, tokenizer.eos_id)
    write_json(folder / CONFIG_FILE, values | {MARK: "scripts.export_hf"})
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    write_json(folder / "generation_config.json", generation)
    card = CARD.format(
        name=name,
        millions=model.num_parameters() / 1e6,
        max_seq_len=config.max_seq_len,
        dtype=dtype,
        inputs=CHAT_INPUTS if chat else TEXT_INPUTS,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_seq_len: int, *, chat: bool) -> None:
    """Write tokenizer.json, what transformers wants beside it, and a SentencePiece model itself;
    with `chat` the template too. Raises DataError: no tokenizer.json gives equal ids."""
    if isinstance(tokenizer, JsonTokenizer):
        copied = Path(tokenizer.path).read_text(encoding="utf-8")
        copied = without_escapes(copied) if chat else copied
        (folder / TOKENIZER_JSON).write_text(copied, encoding="utf-8")
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
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
        "model_max_length": max_seq_len,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        # "<s>" in a text is text. In a conversation the template itself sees to that.
        "split_special_tokens": not chat,
    }
    if chat:
        settings["chat_template"] = JINJA
    write_json(folder / "tokenizer_config.json", markers | settings)
