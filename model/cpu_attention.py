"""Causal attention for CPUs, computed in blocks of query positions.

A block of queries attends to the keys up to the end of the block. Up to half of the T × T scores
are therefore never computed. The query heads that share a key/value head are rows of one matrix.
docs/lab-log.md compares the speed with plain attention and with PyTorch's own CPU attention.
In shape comments Z is batch · n_kv_heads, D is head_dim, and group is n_heads // n_kv_heads.

Forward and backward are custom operations, because torch.compile would unroll their loops.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def row_block_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute softmax(q kᵀ / sqrt(head_dim)) v, where each position sees itself and the past, or
    what a `mask` (B, 1, T, T) allows, see `attention.mask_of`.

    q and the result are (B, T, H, head_dim), k and v are (B, T, n_kv_heads, head_dim). Scores and
    their softmax have the dtype of q. Gradients of k and v are summed over the blocks in fp32."""
    batch, seq_len, n_heads, head_dim = q.shape
    n_kv_heads = k.shape[2]
    group = n_heads // n_kv_heads
    rows = (q * head_dim**-0.5).view(batch, seq_len, n_kv_heads, group, head_dim).transpose(1, 2)
    rows = rows.reshape(batch * n_kv_heads, seq_len * group, head_dim)  # row t · group + g
    k, v = (x.transpose(1, 2).reshape(batch * n_kv_heads, seq_len, head_dim) for x in (k, v))
    out, _ = _attend(rows, k, v, mask)
    out = out.view(batch, n_kv_heads, seq_len, group, head_dim).transpose(1, 2)
    return out.reshape(batch, seq_len, n_heads, head_dim)


def _blocks(seq_len: int, group: int) -> list[tuple[int, int]]:
    """Return the positions (start, end) of each block. Every block except the last has
    max(64, 128 // group) positions. docs/lab-log.md compares block sizes."""
    size = max(64, 128 // group)
    return [(start, min(start + size, seq_len)) for start in range(0, seq_len, size)]


def _walk(flat: Tensor, rows: Tensor, seq_len: int) -> Iterator[tuple[slice, int, int, Tensor]]:
    """Yield (slice of rows, start, end, weights) of each block. `weights`, (Z, rows of
    the block, end), is the block's part of `flat`, which has room for all attention weights."""
    group = rows.shape[1] // seq_len
    used = 0
    for start, end in _blocks(seq_len, group):
        shape = (rows.shape[0], (end - start) * group, end)
        n = math.prod(shape)
        yield slice(start * group, end * group), start, end, flat[used : used + n].view(shape)
        used += n


def _new_flat_weights(rows: Tensor, k: Tensor) -> Tensor:
    group = rows.shape[1] // k.shape[1]
    n = sum((end - start) * group * end for start, end in _blocks(k.shape[1], group))
    return rows.new_empty(rows.shape[0] * n)


@torch.library.custom_op("small_lm::row_block_attention", mutates_args=())
def _attend(
    rows: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output, (Z, T · group, D), and the flat attention weights of all blocks, which
    backward needs. rows are the scaled queries, (Z, T · group, D); k and v are (Z, T, D)."""
    seq_len = k.shape[1]
    group = rows.shape[1] // k.shape[1]
    out = torch.empty_like(rows)
    flat = _new_flat_weights(rows, k)
    size = _blocks(seq_len, group)[0][1]  # positions of the first block, the largest
    future = torch.full((size, size), float("-inf"), dtype=rows.dtype, device=rows.device).triu(1)
    future = future.repeat_interleave(group, dim=0)  # (size · group, size)
    for block, start, end, weights in _walk(flat, rows, seq_len):
        scores = rows[:, block] @ k[:, :end].transpose(1, 2)
        if mask is None:
            scores[:, :, start:] += future[: (end - start) * group, : end - start]
        else:
            of_heads = scores.view(len(mask), -1, end - start, group, end)
            of_heads += mask[:, :, start:end, None, :end]
        torch.softmax(scores, dim=-1, out=weights)
        out[:, block] = weights @ v[:, :end]
    return out, flat


@torch.library.custom_op("small_lm::row_block_attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor, rows: Tensor, k: Tensor, v: Tensor, flat: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of rows, k and v. `grad` is the gradient of the output."""
    grad_rows = torch.empty_like(rows)
    wide = torch.promote_types(rows.dtype, torch.float32)
    grad_k, grad_v = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    for block, _, end, weights in _walk(flat, rows, k.shape[1]):
        grad_v[:, :end] += weights.transpose(1, 2) @ grad[:, block]
        grad_weights = grad[:, block] @ v[:, :end].transpose(1, 2)
        grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, rows.dtype)
        grad_rows[:, block] = grad_scores @ k[:, :end]
        grad_k[:, :end] += grad_scores.transpose(1, 2) @ rows[:, block]
    return grad_rows, grad_k.to(k.dtype), grad_v.to(v.dtype)


@_attend.register_fake
def _(rows, k, v, mask=None):
    return torch.empty_like(rows), _new_flat_weights(rows, k)


@_attend_backward.register_fake
def _(grad, rows, k, v, flat):
    return torch.empty_like(rows), torch.empty_like(k), torch.empty_like(v)


def _save_for_backward(ctx, inputs, output):
    _, flat = output
    ctx.mark_non_differentiable(flat)
    ctx.save_for_backward(*inputs[:3], flat)


def _backward(ctx, grad, _):
    return *_attend_backward(grad.contiguous(), *ctx.saved_tensors), None  # no gradient of the mask


_attend.register_autograd(_backward, setup_context=_save_for_backward)
