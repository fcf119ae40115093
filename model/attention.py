"""Causal self-attention with grouped key/value heads and rotary positions."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import LMConfig
from model.cpu_attention import row_block_attention
from model.rotary import apply_rotary_emb

if TYPE_CHECKING:
    from model.cache import LayerCache


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """Repeat each head n_rep times: (batch, seq_len, n_kv_heads, head_dim) → (batch, seq_len,
    n_heads, head_dim). Query head h then finds its key/value head at index h."""
    if n_rep == 1:
        return x
    batch, seq_len, n_kv_heads, head_dim = x.shape
    x = x[:, :, :, None, :].expand(batch, seq_len, n_kv_heads, n_rep, head_dim)
    return x.reshape(batch, seq_len, n_kv_heads * n_rep, head_dim)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Compute softmax(q kᵀ / sqrt(head_dim)) v; each position sees itself and the past.

    This is the readable reference for the fast paths. It holds all T × T scores in memory. q and
    the result are (B, T, H, head_dim), k and v (B, T, n_kv_heads, head_dim); dropout is the share
    of the attention weights set to zero.
    """
    seq_len = q.shape[1]
    group = q.shape[2] // k.shape[2]
    k, v = repeat_kv(k, group), repeat_kv(v, group)
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H, T, head_dim)
    scores = (q @ k.transpose(-2, -1)).float() / q.shape[-1] ** 0.5
    future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device).triu(1)
    weights = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    return (F.dropout(weights, dropout).type_as(v) @ v).transpose(1, 2)


def fast_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Compute `plain_attention` without holding all T × T scores."""
    if q.device.type == "cpu":
        return plain_attention(q, k, v, dropout) if dropout else row_block_attention(q, k, v)
    return fused_attention(q, k, v, dropout)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Compute `plain_attention` by PyTorch's own kernels for GPUs."""
    if not takes_grouped_heads(q.dtype):
        group = q.shape[2] // k.shape[2]
        k, v = repeat_kv(k, group), repeat_kv(v, group)
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # (B, H, T, head_dim)
    options = {"dropout_p": dropout, "is_causal": True, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def takes_grouped_heads(dtype: torch.dtype) -> bool:
    """Return whether the GPU kernels of this dtype take fewer key/value heads than query heads.

    Flash attention and cuDNN do, but not the memory-efficient kernel, which is left for fp32 and
    for fp16 on old GPUs: PyTorch would silently compute all T × T scores.
    """
    return dtype == torch.bfloat16


class Attention(nn.Module):
    """Grouped-query attention: each n_heads / n_kv_heads query heads share one key/value head.

    Source: Ainslie et al., https://arxiv.org/abs/2305.13245.
    """

    def __init__(self, config: LMConfig):
        super().__init__()
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)
        self.dropout = config.dropout
        self.attend = fast_attention if config.use_flash_attn else plain_attention

    def forward(self, x: Tensor, pos_cis: Tensor, cache: "LayerCache | None" = None) -> Tensor:
        """Attend from every position to itself and the past: (B, T, dim) → (B, T, dim).

        Args:
            pos_cis: rotations of the positions, (T, head_dim/2) or (B, T, head_dim/2).
            cache: holds the past of each sequence, and takes up these positions.
        """
        q, k, v = self.project(x, pos_cis)
        if cache is None:
            out = self.attend(q, k, v, self.dropout if self.training else 0.0)
        else:
            out = cache.attend(q, k, v)
        out = self.wo(out.flatten(2))  # (B, T, H · D) → (B, T, dim)
        return F.dropout(out, self.dropout, self.training) if self.dropout else out

    def project(self, x: Tensor, pos_cis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys, and values, (B, T, heads, head_dim) each."""
        batch, seq_len, _ = x.shape
        q = self.wq(x).view(batch, seq_len, self.n_heads, self.head_dim)
        k = self.wk(x).view(batch, seq_len, self.n_kv_heads, self.head_dim)
        v = self.wv(x).view(batch, seq_len, self.n_kv_heads, self.head_dim)
        return *apply_rotary_emb(q, k, pos_cis), v
