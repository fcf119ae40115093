"""Rotary position embedding (RoPE): rotate queries and keys by angles proportional to the position.

The head_dim channels of a head are head_dim/2 complex numbers. Each pair of neighbouring channels
is one number: x0 + i·x1, x2 + i·x3, and so on. At position t, number j is multiplied by
exp(i·t·theta^(-2j/head_dim)). Source: Su et al., RoFormer, https://arxiv.org/abs/2104.09864.
Llama's own release pairs neighbours too; Hugging Face's Llama pairs channel j with j + head_dim/2.
"""

import math

import torch
from torch import Tensor

from model.config import RopeScaling


def precompute_pos_cis(
    dim: int, end: int, theta: float = 1e6, scaling: RopeScaling | None = None
) -> Tensor:
    """Return the table of rotations cis(angle) = cos(angle) + i·sin(angle), complex64 (end, dim/2).
    An angle is position × frequency. dim is head_dim, end the number of positions, theta the base
    of the frequencies."""
    if dim <= 0 or dim % 2:
        raise ValueError(f"dim must be even and positive, not {dim}")
    # Cast in a second step: under deepspeed.zero.Init, torch.arange(…, dtype=float32) returns bf16.
    positions = torch.arange(end).to(torch.float32)
    angles = torch.outer(positions, rotary_frequencies(dim, theta, scaling))  # (end, dim/2)
    return torch.complex(angles.cos(), angles.sin())


def rotary_frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Return the frequency of each pair of channels in radians per position, fp32 (dim/2,).

    Llama 3.1's scaling depends on how many turns a pair makes within the original context. Pairs
    with many turns keep their frequency. Pairs with few turns become `factor` times slower. For
    pairs in between, the frequency is interpolated. Source: `apply_scaling` in
    https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py."""
    exponents = torch.arange(0, dim, 2).to(torch.float32) / dim
    frequencies = torch.pow(float(theta), -exponents)
    if scaling is None:
        return frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_seq_len / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: unchanged, 0: `factor` times slower
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def apply_rotary_emb(xq: Tensor, xk: Tensor, pos_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions in fp32. Return them with their own dtypes.

    xq is (B, T, n_heads, head_dim), xk is (B, T, n_kv_heads, head_dim). pos_cis is complex
    (T, head_dim/2), or (B, T, head_dim/2) if the sequences are at different positions.

    Raises ValueError if pos_cis is not complex, or its last dimensions do not fit xq."""
    if not pos_cis.is_complex():
        raise ValueError(f"pos_cis must be complex, not {pos_cis.dtype}: it must not be cast")
    if pos_cis.shape[-2:] != (xq.shape[1], xq.shape[-1] // 2):
        raise ValueError(f"pos_cis {tuple(pos_cis.shape)} does not fit queries {tuple(xq.shape)}")
    # Real arithmetic, because torch.compile cannot fuse complex products.
    cos, sin = torch.view_as_real(pos_cis).unsqueeze(-3).unbind(-1)  # (…, T, 1, head_dim/2) each

    def rotate(x: Tensor) -> Tensor:
        real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # (B, T, H, head_dim/2)
        rotated = (real * cos - imaginary * sin, real * sin + imaginary * cos)
        return torch.stack(rotated, dim=-1).flatten(-2).type_as(x)  # (B, T, H, head_dim)

    return rotate(xq), rotate(xk)
