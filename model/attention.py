"""Causal self-attention: grouped key/value heads, rotary positions. In shapes, D is head_dim."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import LMConfig
from model.cpu_attention import row_block_attention
from model.norm import RMSNorm
from model.rotary import apply_rotary_emb


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """Repeat each key/value head n_rep times, so that query head h uses head h of the result."""
    if n_rep == 1:
        return x
    batch, seq_len, n_kv_heads, head_dim = x.shape
    x = x[:, :, :, None, :].expand(batch, seq_len, n_kv_heads, n_rep, head_dim)
    return x.reshape(batch, seq_len, n_kv_heads * n_rep, head_dim)


def mask_of(starts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what to add to scores so that each position sees itself and earlier positions from
    starts[b, t] on, (B, 1, T, T). `starts` is (B, T) int64."""
    at = torch.arange(starts.shape[1], device=starts.device)
    hidden = (at > at[:, None]) | (at < starts[:, :, None])  # (B, T, T)
    return torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, float("-inf"))[:, None]


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None = None
) -> Tensor:
    """Compute softmax(q kᵀ / sqrt(D)) v, where each position sees itself and the past, or what the
    `mask` of `mask_of` allows.

    `fused_attention` and `row_block_attention` give the same, up to rounding and dropout, without
    all T × T scores in memory. q and the result are (B, T, H, D), k and v (B, T, n_kv_heads, D)."""
    seq_len = q.shape[1]
    group = q.shape[2] // k.shape[2]
    k, v = repeat_kv(k, group), repeat_kv(v, group)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    scores = (q @ k.transpose(-2, -1)).float() / q.shape[-1] ** 0.5  # (B, H, T, T)
    if mask is None:
        future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    else:
        scores = scores + mask
    weights = F.softmax(scores, dim=-1)
    return (F.dropout(weights, dropout).type_as(v) @ v).transpose(1, 2)  # (B, T, H, D)


def fast_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None = None
) -> Tensor:
    """Compute attention with the fastest function that this device and this dropout allow."""
    if q.device.type != "cpu":
        return fused_attention(q, k, v, dropout, mask)
    if dropout:
        return plain_attention(q, k, v, dropout, mask)
    return row_block_attention(q, k, v, mask)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None = None
) -> Tensor:
    """Compute the result of `plain_attention` with PyTorch's fused kernels. Flash attention takes
    no mask; the kernels that do take no grouped heads."""
    if mask is not None or not takes_grouped_heads(q.dtype):
        group = q.shape[2] // k.shape[2]
        k, v = repeat_kv(k, group), repeat_kv(v, group)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, heads, T, D)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped
    )
    return out.transpose(1, 2)  # (B, T, H, D)


def takes_grouped_heads(dtype: torch.dtype) -> bool:
    """Return True if the GPU kernels for this dtype accept fewer key/value heads than query heads.

    Only flash attention and cuDNN accept them. Neither supports fp32, nor fp16 on old GPUs. There
    PyTorch would silently compute all T × T scores. For fp16 the result is False on every GPU."""
    return dtype == torch.bfloat16


class Attention(nn.Module):
    """Grouped-query attention: n_heads / n_kv_heads query heads share each key/value head.
    Source: Ainslie et al., https://arxiv.org/abs/2305.13245."""

    def __init__(self, config: LMConfig):
        super().__init__()
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.dropout = config.dropout
        self.attend = fast_attention if config.use_flash_attn else plain_attention

    def forward(
        self,
        x: Tensor,
        pos_cis: Tensor,
        attend: Callable | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Let every position attend to itself and the past: (B, T, dim) → (B, T, dim).

        pos_cis has the rotations of the positions, (T, D/2) or (B, T, D/2). With a cache, `attend`
        computes attention from the queries, keys and values of x. `mask`: see `mask_of`."""
        q, k, v = self.project(x, pos_cis)
        if attend:
            out = attend(q, k, v)
        else:
            out = self.attend(q, k, v, self.dropout if self.training else 0.0, mask)
        out = self.wo(out.flatten(2))  # (B, T, H · D) → (B, T, dim)
        return F.dropout(out, self.dropout, self.training) if self.dropout else out

    def project(self, x: Tensor, pos_cis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys, and values, each (B, T, heads, D)."""
        batch, seq_len, _ = x.shape
        q = self.wq(x).view(batch, seq_len, self.n_heads, self.head_dim)
        k = self.wk(x).view(batch, seq_len, self.n_kv_heads, self.head_dim)
        v = self.wv(x).view(batch, seq_len, self.n_kv_heads, self.head_dim)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_emb(q, k, pos_cis)
        return q, k, v
