"""Convert the settings of a model to Hugging Face's config.json and back.

A model is a Llama, or a Qwen3 if it normalises queries and keys. With experts it is a Qwen3-MoE, or
a Qwen2-MoE whose shared expert is empty (width 0). In all of them the router's softmax covers all
experts: without norm_topk_prob, a token's weights sum to below 1.
"""

from pathlib import Path

from lm.common.errors import UsageError
from lm.formats.portable import CONFIG_FILE, build_config, read_json
from model.config import LMConfig

# (has experts, normalises queries and keys) → model_type, and the class in transformers
MODEL_TYPES = {
    (False, False): ("llama", "LlamaForCausalLM"),
    (False, True): ("qwen3", "Qwen3ForCausalLM"),
    (True, False): ("qwen2_moe", "Qwen2MoeForCausalLM"),
    (True, True): ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
# Settings of a model, of its experts, and of rope_type "llama3": our names → Hugging Face's.
SETTINGS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "max_seq_len": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}
EXPERTS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_hidden_dim": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
}
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
    names = SETTINGS | (EXPERTS if config.use_moe else {})
    values = {theirs: getattr(config, ours) for ours, theirs in names.items()} | {
        "model_type": model_type,
        "architectures": [architecture],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": rope,
        "rope_scaling": rope if config.rope_scaling else None,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if config.use_moe:
        values["shared_expert_intermediate_size"] = 0
        values["router_aux_loss_coef"] = config.router_aux_loss
        values["qkv_bias"] = False
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
    """Read config.json. Raises UsageError if a setting has no counterpart in this model."""
    if (folder / "adapter_config.json").exists():
        remedy = "merge it into its base with merge_and_unload() of PEFT, and import that"
        raise UsageError(f"{folder} is an adapter of PEFT: {remedy}")
    values = read_json(folder / CONFIG_FILE)
    model_type = values.get("model_type")
    if model_type not in READABLE:
        readable = ", ".join(READABLE)
        raise UsageError(f"{folder}: model_type is {model_type!r}, only {readable} can be read")
    rope = (values.get("rope_parameters") or {}) | (values.get("rope_scaling") or {})
    rope_type = rope.get("type") or rope.get("rope_type", "default")  # "type" is the old name
    for name, allowed in COMPUTED.items():
        value = (values | {"rope_type": rope_type}).get(name, allowed[0])
        if value not in allowed:
            raise UsageError(f"{folder}: {name} is {value!r}, which this model cannot compute")
    given = {name: value for name, value in values.items() if value is not None}
    is_minimind = model_type == "minimind"
    defaults = {  # of transformers, or of MiniMind
        "num_key_value_heads": given.get("num_attention_heads"),
        "head_dim": 128 if model_type == "qwen3" else None,  # None: hidden_size / number of heads
        "intermediate_size": None if "intermediate_size" in values else 11008,  # None: by dim
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": is_minimind,
        "num_experts": given.get("n_routed_experts") or given.get("num_local_experts"),
        "norm_topk_prob": is_minimind,
    }
    has_experts = model_type.endswith("_moe") or bool(given.get("use_moe"))
    names = SETTINGS | (EXPERTS if has_experts else {})
    config = {ours: (defaults | given).get(theirs) for ours, theirs in names.items()}
    scaling = {ours: rope.get(theirs) for ours, theirs in SCALING.items()}
    config |= {
        "rope_theta": rope.get("rope_theta") or config["rope_theta"],
        "rope_scaling": scaling if rope_type == "llama3" else None,
        # Earlier models of MiniMind have the same model_type, but n_routed_experts.
        "qk_norm": model_type.startswith("qwen3") or (is_minimind and "num_experts" in given),
        "use_moe": has_experts,
        "n_shared_experts": given.get("n_shared_experts", 0) if has_experts else 0,
    }
    return build_config(config, folder)
