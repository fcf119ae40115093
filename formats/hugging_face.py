"""Convert a model to Hugging Face's Llama and back: weights, settings and tokenizer.

A model with experts becomes a Qwen2-MoE whose shared expert is empty (width 0). In both models
the router's softmax covers all experts: without norm_topk_prob, a token's weights sum to below 1.

Rotary embedding rotates pairs of channels of a head. Here, as in Llama's own release, a pair is
(0, 1), (2, 3), …; in Hugging Face's Llama it is (j, j + head_dim/2). The rows of wq and wk, which
compute these channels, are therefore reordered. All other weights are equal.
"""

import re
import shutil
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UsageError
from data.chat_template import JINJA
from data.tokenizer import TOKENIZER_FILE, TOKENIZER_JSON, JsonTokenizer, Tokenizer, read_markers
from formats.portable import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    WeightsError,
    build_config,
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
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.router": "mlp.gate",
}


def reordered(weight: Tensor, *order: int) -> Tensor:
    """Reorder rows of wq or wk, (heads · head_dim, dim). Our order is (heads, head_dim/2, 2),
    theirs (heads, 2, head_dim/2). `order` is that of `weight`; the result has the other one."""
    return weight.unflatten(0, order).transpose(1, 2).reshape_as(weight)


def rotated_heads(name: str, config: LMConfig) -> int | None:
    """Return the number of heads of a wq or wk, and None for the names of other weights."""
    return {"wq": config.n_heads, "wk": config.n_kv_heads}.get(name.split(".")[-2])


def to_llama(config: LMConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights to Hugging Face's names, where each expert has its own matrices, and reorder
    the rows of wq and wk."""
    renamed = {}
    for name, weight in weights.items():
        heads = rotated_heads(name, config)
        theirs = llama_name(name)
        if weight.dim() == 3:  # (experts, rows, cols)
            for i, matrix in enumerate(weight):
                renamed[theirs.replace("mlp.", f"mlp.experts.{i}.")] = matrix
        else:
            renamed[theirs] = reordered(weight, heads, -1, 2) if heads else weight
    return renamed


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
    """Return an empty shared expert's weights for each layer; {} for a model without experts."""
    shapes = {"_gate": (1, config.dim), ".gate_proj": (0, config.dim)}
    shapes |= {".up_proj": (0, config.dim), ".down_proj": (config.dim, 0)}
    layers = range(config.n_layers if config.use_moe else 0)
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


# Settings of rope_type "llama3": our names → Hugging Face's.
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}


def llama_config(config: LMConfig, dtype: str, bos_id: int, eos_id: int) -> dict:
    """Return config.json. transformers 4 and 5 use different keys for dtype and rotary settings."""
    rope = {"rope_type": "default"}
    if scaling := config.rope_scaling:
        rope = {theirs: getattr(scaling, ours) for ours, theirs in SCALING.items()}
        rope["rope_type"] = "llama3"
    rope["rope_theta"] = config.rope_theta
    values = {
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
    if config.use_moe:
        values |= {
            "model_type": "qwen2_moe",
            "architectures": ["Qwen2MoeForCausalLM"],
            "num_experts": config.n_routed_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "moe_intermediate_size": config.moe_hidden_dim,
            "shared_expert_intermediate_size": 0,
            "norm_topk_prob": config.norm_topk_prob,
            "router_aux_loss_coef": config.router_aux_loss,
            "qkv_bias": False,
        }
    return values


# Settings in config.json → values that this model can compute. The first is the default.
COMPUTED = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "scoring_func": ("softmax",),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "rope_type": ("default", "llama3"),
}


READABLE = ("llama", "qwen2_moe", "minimind")  # values of model_type


def read_llama_config(folder: Path) -> LMConfig:
    """Read config.json. Raises WeightsError if a setting has no counterpart in this model."""
    values = read_json(folder / CONFIG_FILE)
    if (kind := values.get("model_type")) not in READABLE:
        kinds = ", ".join(READABLE)
        raise WeightsError(f"{folder}: model_type is {kind!r}, only {kinds} can be read")
    rope = (values.get("rope_parameters") or {}) | (values.get("rope_scaling") or {})
    rope_type = rope.get("type") or rope.get("rope_type", "default")  # "type" is the old name
    for name, allowed in COMPUTED.items():
        value = (values | {"rope_type": rope_type}).get(name, allowed[0])
        if value not in allowed:
            raise WeightsError(f"{folder}: {name} is {value!r}, which this model cannot compute")
    scaling = {ours: rope.get(theirs) for ours, theirs in SCALING.items()}
    config = {
        "dim": values.get("hidden_size"),
        "n_layers": values.get("num_hidden_layers"),
        "n_heads": values.get("num_attention_heads"),
        "n_kv_heads": values.get("num_key_value_heads") or values.get("num_attention_heads"),
        "vocab_size": values.get("vocab_size"),
        "head_dim": values.get("head_dim"),
        "hidden_dim": values.get("intermediate_size", 11008),
        "norm_eps": values.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta") or values.get("rope_theta", 10000.0),
        "rope_scaling": scaling if rope_type == "llama3" else None,
        "max_seq_len": values.get("max_position_embeddings", 2048),
        "tie_embeddings": values.get("tie_word_embeddings", kind == "minimind"),
    }
    if kind == "qwen2_moe" or values.get("use_moe"):
        hidden_dim = values.get("moe_intermediate_size") or config["hidden_dim"]
        config |= {
            "use_moe": True,
            "n_routed_experts": values.get("n_routed_experts") or values.get("num_experts"),
            "num_experts_per_tok": values.get("num_experts_per_tok"),
            "n_shared_experts": values.get("n_shared_experts") or 0,
            "moe_hidden_dim": hidden_dim,
            "norm_topk_prob": values.get("norm_topk_prob", kind == "minimind"),
        }
    return build_config(config, folder)


def read_llama_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face folder with our names and our order of rows."""
    config = read_llama_config(folder)
    weights, stacks, inert = {}, defaultdict(dict), inert_weights(config)
    parts = sorted(folder.glob("model-*-of-*.safetensors")) or [folder / WEIGHTS_FILE]
    if not parts[0].exists():  # as older versions of transformers, and MiniMind, write it
        parts = sorted(folder.glob("pytorch_model*.bin")) or parts
    for part in parts:
        for name, weight in load_tensors(part).items():
            if not isinstance(weight, Tensor):
                raise WeightsError(f"{part}: {name} is not a tensor")
            if not is_learned(name) or (name in inert and weight.shape == inert[name].shape):
                continue
            ours = our_name(EXPERT.sub("", name), str(folder))
            if config.use_moe and "feed_forward" in ours:
                ours = ours.removesuffix(".weight")
            if expert := EXPERT.search(name):  # shared experts follow the routed ones
                number = int(expert[2]) + config.n_routed_experts * bool(expert[1])
                stacks[ours][number] = weight
            else:
                weights[ours] = our_rows(config, ours, weight)
    for name, stack in stacks.items():
        weights[name] = torch.stack([stack[number] for number in sorted(stack)])
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
    write_json(folder / "tokenizer_config.json", markers | settings)
