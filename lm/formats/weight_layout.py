"""Translate weights to the names and the order of rows of Hugging Face's Llama and Qwen3, and back.

Rotary embedding rotates pairs of channels of a head. Here, as in Llama's own release, a pair is
(0, 1), (2, 3), …; in Hugging Face's Llama it is (j, j + head_dim/2). The rows of wq and wk, which
compute these channels, and the weights of their norms are therefore reordered. All other weights
are equal.
"""

import re
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from lm.formats.portable import WeightsError
from model.config import LMConfig

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


def reordered(config: LMConfig, name: str, weight: Tensor, *order: int) -> Tensor:
    """Return a weight whose rows (the last two numbers of `order`: -1 and 2) are in the other order
    (2 and -1), if `name`, ours, is that of a wq or wk, (heads · head_dim, dim), or of their norms,
    (head_dim,), which all heads share. Our order is (heads, head_dim/2, 2), theirs (heads, 2,
    head_dim/2)."""
    of_layer = {"wq": config.n_heads, "wk": config.n_kv_heads, "q_norm": 1, "k_norm": 1}
    heads = of_layer.get(name.split(".")[-2])
    if not heads or weight.shape[:1] != (heads * config.head_dim,):  # another weight, a wrong shape
        return weight
    return weight.unflatten(0, (heads, *order)).transpose(1, 2).reshape_as(weight)


def their_rows(config: LMConfig, name: str, weight: Tensor) -> Tensor:
    """Return our weight with rows in Hugging Face's order. `name` is our name of the weight."""
    return reordered(config, name, weight, -1, 2)


def our_rows(config: LMConfig, name: str, weight: Tensor) -> Tensor:
    """Return Hugging Face's weight with rows in our order. `name` is our name of the weight."""
    return reordered(config, name, weight, 2, -1)


def to_hugging_face(config: LMConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights to Hugging Face's names, where each expert has its own matrices, and reorder
    the rows of wq and wk."""
    renamed = {}
    for name, weight in weights.items():
        theirs = their_name(name)
        if weight.dim() == 3:  # (experts, rows, cols)
            for i, matrix in enumerate(weight):
                renamed[theirs.replace("mlp.", f"mlp.experts.{i}.")] = matrix
        else:
            renamed[theirs] = their_rows(config, name, weight)
    return renamed


def their_name(name: str) -> str:
    """Return Hugging Face's name of a weight."""
    if layer := re.fullmatch(r"layers\.(\d+)\.(.+?)(\.weight)?", name):
        return f"model.layers.{layer[1]}.{IN_LAYER[layer[2]]}.weight"
    return OUTER[name]


# What other programs put before names: DDP, torch.compile, AutoModelForCausalLM (not AutoModel).
PREFIX = re.compile(r"^(module\.|_orig_mod\.|transformer\.|model\.)+")
OUTER_NAMES = {PREFIX.sub("", theirs): ours for ours, theirs in OUTER.items()}
INNER_NAMES = {theirs: ours for ours, theirs in IN_LAYER.items()}


def our_name(name: str, source: str) -> str:
    """Return our name for `name`, which is Hugging Face's or ours. Raises WeightsError if there is
    none."""
    core = PREFIX.sub("", name)
    layer = re.fullmatch(r"layers\.(\d+)\.(.+?)(\.weight)?", core)
    if core in OUTER or (layer and layer[2] in IN_LAYER):
        return core
    if layer and layer[3] and layer[2] in INNER_NAMES:
        return f"layers.{layer[1]}.{INNER_NAMES[layer[2]]}.weight"
    if core in OUTER_NAMES:
        return OUTER_NAMES[core]
    why = "has no counterpart in this model"
    if "lora_" in name:
        why = "is an adapter: merge it into its base with merge_and_unload() of PEFT, and save that"
    elif not name.endswith((".weight", ".bias")) or "scale" in name:
        why = "is of a quantised model: import the model that is not quantised"
    raise WeightsError(f"{source}: {name} {why}")


# Tables of positions and masks, which some programs save with the weights.
TABLE = re.compile(
    r"(^|\.)(inv_freq|rope\.freqs|freqs_(cis|cos|sin)|pos_cis|(sin|cos)_cached|mask)$"
)


EXPERT = re.compile(r"\.(shared_)?experts\.(\d+)")  # in names of an expert's matrices


def our_weights(weights: Iterable[tuple[str, Tensor]], source: str) -> dict[str, Tensor]:
    """Return weights with our names; the matrices of experts are stacked. Raises WeightsError if
    a weight has no counterpart in this model."""
    renamed, stacks = {}, defaultdict(dict)
    for name, weight in weights:
        if not isinstance(weight, Tensor):
            raise WeightsError(f"{source}: {name} is not a tensor")
        is_inert = not weight.numel() or name.endswith("shared_expert_gate.weight")
        if TABLE.search(name) or is_inert:
            continue
        ours = our_name(EXPERT.sub("", name), source)
        if ours in renamed:
            raise WeightsError(f"{source}: {name} is there twice, under two prefixes")
        if expert := EXPERT.search(name):  # shared experts follow the routed ones
            stacks[ours.removesuffix(".weight")][bool(expert[1]), int(expert[2])] = weight
        else:
            renamed[re.sub(r"router\.weight$", "router", ours)] = weight
    for name, stack in stacks.items():
        if len({matrix.shape for matrix in stack.values()}) > 1:
            raise WeightsError(f"{source}: experts have matrices of different shapes for {name}")
        renamed[name] = torch.stack([stack[number] for number in sorted(stack)])
    return renamed
