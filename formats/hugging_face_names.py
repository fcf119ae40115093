"""This model as Hugging Face's Llama: names of weights, rotation of positions, settings.

The arithmetic differs in one thing. Rotary embedding turns pairs of a head's channels: here, as in
Llama's own release, neighbours (0, 1), (2, 3), …; there channel j with j + head_dim/2. So the rows
of wq and wk, which make those channels, change places. Nothing else is reordered: the product of
queries and keys does not depend on the order of channels.
"""

import re

from torch import Tensor

from model.config import ConfigError, LMConfig, RopeScaling

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


def our_names(weights: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """Rename Hugging Face's weights to our names; the rows of wq and wk stay in their order. Raises
    ConfigError: a name that a Llama does not have."""
    outer = {theirs: ours for ours, theirs in OUTER.items()}
    in_layer = {theirs: ours for ours, theirs in IN_LAYER.items()}
    ours = {}
    for name, weight in weights.items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        if layer and layer[2] in in_layer:
            ours[f"layers.{layer[1]}.{in_layer[layer[2]]}.weight"] = weight
        elif name in outer:
            ours[outer[name]] = weight
        else:
            raise ConfigError(f"{source}: {name} is in no Llama")
    return ours


def our_rotation(config: LMConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reorder wq and wk in Hugging Face's weights with our names and the config's shapes."""
    heads = {name: rotated_heads(name, config) for name in weights}
    return {n: join_halves(w, heads[n]) if heads[n] else w for n, w in weights.items()}


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


def config_from_llama(values: dict) -> LMConfig:
    """Undo `llama_config`; missing settings have the defaults of transformers' LlamaConfig. Raises
    ConfigError: something that this model cannot compute; names the setting and its value."""
    rope = {}
    for name in ("rope_parameters", "rope_scaling"):  # the second wins in transformers
        given = values.get(name) or {}
        if not isinstance(given, dict):
            raise ConfigError(f"{name} must be an object, not {given!r}")
        refuse_other_arithmetic(values, given)
        rope |= given
    needed = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"}
    if missing := needed - values.keys():
        raise ConfigError(f"{min(missing)} is missing")
    return LMConfig(
        dim=values["hidden_size"],
        n_layers=values["num_hidden_layers"],
        n_heads=values["num_attention_heads"],
        n_kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
        vocab_size=values["vocab_size"],
        head_dim=values.get("head_dim"),
        hidden_dim=values.get("intermediate_size", 11008),
        norm_eps=values.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or values.get("rope_theta", 10000.0),
        rope_scaling=rope_scaling(rope),
        max_seq_len=values.get("max_position_embeddings", 2048),
        tie_embeddings=values.get("tie_word_embeddings", False),
    )


def refuse_other_arithmetic(values: dict, rope: dict) -> None:
    """Raise ConfigError for another architecture, or a Llama with parts that ours lacks."""
    if values.get("model_type") != "llama":
        raise ConfigError(f"model_type is {values.get('model_type')!r}: only 'llama' can be read")
    plain = {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "partial_rotary_factor": (1.0,),
        "quantization_config": (None,),
    }
    for name, allowed in plain.items():
        if values.get(name, allowed[0]) not in allowed:
            raise ConfigError(f"{name} is {values[name]!r}: this model has {allowed[0]!r} only")
    if (kind := rope_type(rope)) not in ("default", "llama3"):
        raise ConfigError(f"rope_scaling is {kind!r}: this model has 'llama3' only")


def rope_type(rope: dict) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def rope_scaling(rope: dict) -> RopeScaling | None:
    """Read rope_type "llama3". Raises ConfigError: a number is missing, or cannot be."""
    if rope_type(rope) == "default":
        return None
    if missing := set(SCALING.values()) - rope.keys():
        raise ConfigError(f"rope_scaling: {min(missing)} is missing")
    return RopeScaling(**{ours: rope[theirs] for ours, theirs in SCALING.items()})
