"""Rotary position embedding (RoPE): queries and keys are turned by angles proportional to position.

A head's channels are head_dim/2 complex numbers, pairs of neighbours (x0 + i·x1, x2 + i·x3, …), and
number j is multiplied by exp(i·t·theta^(-2j/head_dim)) at position t. Source: Su et al., RoFormer,
https://arxiv.org/abs/2104.09864; pairs as in Llama's own release (Hugging Face's Llama pairs
channel j with j + head_dim/2).
"""

import math

import torch
from torch import Tensor

from model.config import RopeScaling


def precompute_pos_cis(
    dim: int, end: int, theta: float = 1e6, scaling: RopeScaling | None = None
) -> Tensor:
    """Return the table of rotations: complex64 of shape (end, dim/2), every entry of modulus 1.

    dim is head_dim, even; end is the number of positions; theta is the base of the frequencies.
    """
    if dim <= 0 or dim % 2:
        raise ValueError(f"dim must be even and positive, not {dim}")
    # Integers first: under deepspeed.zero.Init torch.arange(…, dtype=float32) comes out in bf16.
    positions = torch.arange(end).to(torch.float32)
    angles = torch.outer(positions, rotary_frequencies(dim, theta, scaling))  # (end, dim/2)
    return torch.complex(angles.cos(), angles.sin())


def rotary_frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Return the radians per position of each pair of channels, fp32 of shape (dim/2,).

    Llama 3.1's scaling keeps rotations that turn often within the original context, makes those
    that turn seldom `factor` times slower, and interpolates between. Source: `apply_scaling` in
    https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py.
    """
    exponents = torch.arange(0, dim, 2).to(torch.float32) / dim
    frequencies = torch.pow(float(theta), -exponents)
    if scaling is None:
        return frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_seq_len / (2 * math.pi / frequencies)
    fast = ((turns - low) / (high - low)).clamp(0, 1)  # 1: left as it is
    return (1 - fast) * frequencies / scaling.factor + fast * frequencies


def apply_rotary_emb(xq: Tensor, xk: Tensor, pos_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by their positions.

    Args:
        xq: (batch, seq_len, n_heads, head_dim), any floating dtype.
        xk: (batch, seq_len, n_kv_heads, head_dim).
        pos_cis: complex (seq_len, head_dim/2), the rotations of the positions; with a batch
            dimension in front where sequences stand at different positions.

    Returns:
        The turned xq and xk in their own shapes and dtypes, computed in fp32.

    Raises ValueError: pos_cis is not complex, or does not fit the sequence.
    """
    if not pos_cis.is_complex():
        raise ValueError(f"pos_cis must be complex, not {pos_cis.dtype}: a cast lost half of it")
    if pos_cis.shape[-2:] != (xq.shape[1], xq.shape[-1] // 2):
        raise ValueError(f"pos_cis {tuple(pos_cis.shape)} does not fit queries {tuple(xq.shape)}")
    # The real view instead of complex products: the same arithmetic, which torch.compile can fuse.
    cos, sin = torch.view_as_real(pos_cis).unsqueeze(-3).unbind(-1)  # (T, 1, head_dim/2) each

    def turn(x: Tensor) -> Tensor:
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # (B, T, H, head_dim/2) each
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2).type_as(x)

    return turn(xq), turn(xk)
