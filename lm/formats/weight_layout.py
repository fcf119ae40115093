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

from lm.common.errors import UsageError
from model.config import LMConfig

# Names of modules, without the layer: ours (as in Llama's own release) → Hugging Face's.
NAMES = {
    "tok_embeddings": "embed_tokens",
    "norm": "norm",
    "output": "lm_head",
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
OUR_NAMES = {theirs: ours for ours, theirs in NAMES.items()}
PARTS = re.compile(r"(layers\.\d+\.)?(.*?)(\.weight)?", re.DOTALL)  # of names without PREFIX
# What other programs put before names: DDP, torch.compile, AutoModelForCausalLM (not AutoModel).
PREFIX = re.compile(r"^(module\.|_orig_mod\.|transformer\.|model\.)+")
EXPERT = re.compile(r"\.(shared_)?experts\.(\d+)")  # in names of an expert's matrices
# Tables of positions and masks, which some programs save with the weights.
TABLE = re.compile(
    r"(^|\.)(inv_freq|rope\.freqs|freqs_(cis|cos|sin)|pos_cis|(sin|cos)_cached|mask)$"
)
OUR_ORDER, THEIR_ORDER = (-1, 2), (2, -1)  # the head_dim rows of a head: pairs, or halves


def reordered(config: LMConfig, name: str, weight: Tensor, order: tuple[int, int]) -> Tensor:
    """Return a weight, whose rows are in `order`, with rows in the other order if `name`, ours, is
    that of a wq or wk, (heads · head_dim, dim), or of their norms, (head_dim,), which all heads
    share; other weights as they are."""
    of_layer = {"wq": config.n_heads, "wk": config.n_kv_heads, "q_norm": 1, "k_norm": 1}
    heads = of_layer.get(name.split(".")[-2])
    if not heads or weight.shape[:1] != (heads * config.head_dim,):  # another weight, a wrong shape
        return weight
    return weight.unflatten(0, (heads, *order)).transpose(1, 2).reshape_as(weight)


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
            renamed[theirs] = reordered(config, name, weight, OUR_ORDER)
    return renamed


def their_name(name: str) -> str:
    """Return Hugging Face's name of a weight."""
    layer, module, _ = PARTS.fullmatch(name).groups("")
    return f"{'' if module == 'output' else 'model.'}{layer}{NAMES[module]}.weight"


def our_name(name: str, source: str) -> str:
    """Return our name for `name`, which is Hugging Face's or ours. Raises UsageError if there is
    none."""
    layer, module, end = PARTS.fullmatch(PREFIX.sub("", name)).groups("")
    if module in NAMES and (layer or end):
        return f"{layer}{module}{end}"
    if module in OUR_NAMES and end:
        return f"{layer}{OUR_NAMES[module]}{end}"
    why = "has no counterpart in this model"
    if "lora_" in name:
        why = "is an adapter: merge it into its base with merge_and_unload() of PEFT, and save that"
    elif not name.endswith((".weight", ".bias")) or "scale" in name:
        why = "is of a quantised model: import the model that is not quantised"
    raise UsageError(f"{source}: {name} {why}")


def our_weights(weights: Iterable[tuple[str, Tensor]], source: str) -> dict[str, Tensor]:
    """Return weights with our names; the matrices of experts are stacked. Raises UsageError if
    a weight has no counterpart in this model."""
    renamed, stacks = {}, defaultdict(dict)
    for name, weight in weights:
        if not isinstance(weight, Tensor):
            raise UsageError(f"{source}: {name} is not a tensor")
        if TABLE.search(name) or not weight.numel() or name.endswith("shared_expert_gate.weight"):
            continue
        ours = our_name(EXPERT.sub("", name), source)
        if ours in renamed:
            raise UsageError(f"{source}: {name} is there twice, under two prefixes")
        if expert := EXPERT.search(name):  # shared experts follow the routed ones
            stacks[ours.removesuffix(".weight")][bool(expert[1]), int(expert[2])] = weight
        else:
            renamed[re.sub(r"router\.weight$", "router", ours)] = weight
    for name, stack in stacks.items():
        if len({matrix.shape for matrix in stack.values()}) > 1:
            raise UsageError(f"{source}: experts have matrices of different shapes for {name}")
        renamed[name] = torch.stack([stack[number] for number in sorted(stack)])
    return renamed
