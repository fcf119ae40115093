"""Convert the settings of a model to Hugging Face's config.json and back.

A model is a Llama, or a Qwen3 if it normalises queries and keys. With experts it is a Qwen3-MoE, or
a Qwen2-MoE whose shared expert is empty (width 0). In all of them the router's softmax covers all
experts: without norm_topk_prob, a token's weights sum to below 1.
"""

from pathlib import Path

from lm.formats.portable import CONFIG_FILE, WeightsError, build_config, read_json
from model.config import LMConfig

# (has experts, normalises queries and keys) → model_type, and the class in transformers
MODEL_TYPES = {
    (False, False): ("llama", "LlamaForCausalLM"),
    (False, True): ("qwen3", "Qwen3ForCausalLM"),
    (True, False): ("qwen2_moe", "Qwen2MoeForCausalLM"),
    (True, True): ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
# Settings of rope_type "llama3": our names → Hugging Face's.
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}


def config_json_of(config: LMConfig, dtype: str, bos_id: int, eos_id: int) -> dict:
    """Return config.json. transformers 4 and 5 use different keys for dtype and rotary settings."""
    rope = {"rope_type": "default"}
    if scaling := config.rope_scaling:
        rope = {theirs: getattr(scaling, ours) for ours, theirs in SCALING.items()}
        rope["rope_type"] = "llama3"
    rope["rope_theta"] = config.rope_theta
    model_type, architecture = MODEL_TYPES[config.use_moe, config.qk_norm]
    values = {
        "model_type": model_type,
        "architectures": [architecture],
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
READABLE = [*dict(MODEL_TYPES.values()), "minimind"]  # values of model_type


def read_config_json(folder: Path) -> LMConfig:
    """Read config.json. Raises WeightsError if a setting has no counterpart in this model."""
    if (folder / "adapter_config.json").exists():
        remedy = "merge it into its base with merge_and_unload() of PEFT, and import that"
        raise WeightsError(f"{folder} is an adapter of PEFT: {remedy}")
    values = read_json(folder / CONFIG_FILE)
    model_type = values.get("model_type")
    if model_type not in READABLE:
        readable = ", ".join(READABLE)
        raise WeightsError(f"{folder}: model_type is {model_type!r}, only {readable} can be read")
    is_minimind = model_type == "minimind"
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
        # transformers' default: for other models, hidden_size divided by the number of heads
        "head_dim": values.get("head_dim") or (128 if model_type == "qwen3" else None),
        "hidden_dim": values.get("intermediate_size", 11008),
        "norm_eps": values.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta") or values.get("rope_theta", 10000.0),
        "rope_scaling": scaling if rope_type == "llama3" else None,
        "max_seq_len": values.get("max_position_embeddings", 2048),
        "tie_embeddings": values.get("tie_word_embeddings", is_minimind),
        # Earlier models of MiniMind have the same model_type, but n_routed_experts.
        "qk_norm": model_type.startswith("qwen3") or (is_minimind and "num_experts" in values),
    }
    if model_type.endswith("_moe") or values.get("use_moe"):
        hidden_dim = values.get("moe_intermediate_size") or config["hidden_dim"]
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        config |= {
            "use_moe": True,
            "n_routed_experts": next((values[name] for name in names if values.get(name)), None),
            "num_experts_per_tok": values.get("num_experts_per_tok"),
            "n_shared_experts": values.get("n_shared_experts") or 0,
            "moe_hidden_dim": hidden_dim,
            "norm_topk_prob": values.get("norm_topk_prob", is_minimind),
        }
    return build_config(config, folder)
