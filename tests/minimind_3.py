"""MiniMind-3 in plain functions, to compare imported models with: random weights under MiniMind's
names, its config.json, and logits. Written from the description of Qwen3, not from MiniMind's code.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

DIM, N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM, VOCAB = 48, 2, 8, 4, 10, 400
HIDDEN_DIM, N_EXPERTS, EXPERT_DIM, THETA, EPS = 80, 4, 24, 1e6, 1e-6


def config(use_moe: bool) -> dict:
    """Return config.json. MiniMind writes the settings of experts for dense models too."""
    return {
        "model_type": "minimind",
        "architectures": ["MiniMindForCausalLM"],
        "use_moe": use_moe,
        **{"hidden_size": DIM, "num_hidden_layers": N_LAYERS, "vocab_size": VOCAB},
        **{"num_attention_heads": N_HEADS, "num_key_value_heads": N_KV_HEADS},
        **{"head_dim": HEAD_DIM, "intermediate_size": HIDDEN_DIM, "hidden_act": "silu"},
        **{"rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 64},
        **{"inference_rope_scaling": False, "rope_scaling": None, "tie_word_embeddings": True},
        **{"num_experts": N_EXPERTS, "num_experts_per_tok": 1, "moe_intermediate_size": EXPERT_DIM},
        **{"norm_topk_prob": True, "router_aux_loss_coef": 5e-4, "dropout": 0.0},
    }


def random_weights(use_moe: bool) -> dict[str, Tensor]:
    shapes = {"model.embed_tokens": (VOCAB, DIM), "model.norm": (DIM,)}
    for i in range(N_LAYERS):
        at = f"model.layers.{i}"
        for name, heads in (("q", N_HEADS), ("k", N_KV_HEADS), ("v", N_KV_HEADS)):
            shapes[f"{at}.self_attn.{name}_proj"] = (heads * HEAD_DIM, DIM)
        shapes[f"{at}.self_attn.o_proj"] = (DIM, N_HEADS * HEAD_DIM)
        shapes |= {f"{at}.self_attn.{name}_norm": (HEAD_DIM,) for name in "qk"}
        shapes |= {f"{at}.{name}_layernorm": (DIM,) for name in ("input", "post_attention")}
        networks = {f"{at}.mlp": HIDDEN_DIM}
        if use_moe:
            shapes[f"{at}.mlp.gate"] = (N_EXPERTS, DIM)
            networks = {f"{at}.mlp.experts.{j}": EXPERT_DIM for j in range(N_EXPERTS)}
        for name, width in networks.items():
            shapes |= {f"{name}.{kind}_proj": (width, DIM) for kind in ("gate", "up")}
            shapes[f"{name}.down_proj"] = (DIM, width)
    torch.manual_seed(2)
    drawn = {
        f"{name}.weight": torch.randn(shape) * 0.1 if len(shape) > 1 else torch.rand(shape) + 0.5
        for name, shape in shapes.items()
    }
    return drawn | {"lm_head.weight": drawn["model.embed_tokens.weight"]}


def logits(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return (B, T, VOCAB) for tokens of shape (B, T)."""
    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(N_LAYERS):
        start = f"model.layers.{i}."
        w = {k.removeprefix(start)[:-7]: v for k, v in weights.items() if k.startswith(start)}
        x = x + attention(w, rms_norm(x, w["input_layernorm"]))
        x = x + feed_forward(w, rms_norm(x, w["post_attention_layernorm"]))
    return rms_norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def attention(w: dict[str, Tensor], x: Tensor) -> Tensor:
    q, k, v = (
        (x @ w[f"self_attn.{name}_proj"].T).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        for name in "qkv"
    )  # (B, heads, T, HEAD_DIM)
    q, k = (rotate(rms_norm(y, w[f"self_attn.{n}_norm"])) for n, y in (("q", q), ("k", k)))
    k, v = (y.repeat_interleave(N_HEADS // N_KV_HEADS, dim=1) for y in (k, v))
    scores = q @ k.transpose(-2, -1) / HEAD_DIM**0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    heads = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
    return heads.transpose(1, 2).flatten(-2) @ w["self_attn.o_proj"].T


def rotate(x: Tensor) -> Tensor:
    """Rotate the pair of channels (j, j + HEAD_DIM/2) at position t by t / THETA^(2j/HEAD_DIM)."""
    j = torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
    angle = torch.arange(x.shape[-2])[:, None] / THETA**j
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def feed_forward(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """One network; with experts, the output of the likeliest expert, whose weight p / p is 1."""

    def network(name: str) -> Tensor:
        gate, up, down = (w[f"{name}.{kind}_proj"] for kind in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    if "mlp.gate" not in w:
        return network("mlp")
    chosen = (x @ w["mlp.gate"].T).argmax(-1, keepdim=True)  # (B, T, 1)
    return sum(network(f"mlp.experts.{j}") * (chosen == j) for j in range(N_EXPERTS))
