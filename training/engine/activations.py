"""How many bytes a forward pass keeps for backward, counted tensor by tensor.

What autograd saves for the operations of `model/`. tests/test_activations.py counts the same in a
model, by torch.autograd.graph.saved_tensors_hooks. h is 2 bytes in 16 bits, 4 in fp32.
"""

from dataclasses import dataclass

import torch

from model.attention import takes_grouped_heads
from model.loss import tokens_at_once
from training.engine.workload import Workload

# What training/distillation_loss.py has of a chunk of tokens, in forward and backward.
COMPARED = 6 * (1 << 27)


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch."""

    kept: int  # by all blocks, the final norm and the loss, from forward to backward
    logits: int  # at most, with their copies and gradient, when backward begins
    block: int  # at most, while one block is at its backward: recomputed, and gradients on the way


def activations(work: Workload, autocast: bool = False) -> Activations:
    """Of a micro-batch of one process.

    Args:
        autocast: the weights are fp32 and cast to 16 bits, and those copies kept too.
    """
    config, h, compiled = work.config, work.half, work.compiled
    dim, block = config.dim, _block(work)
    # The fused norm of a compiled block keeps its input, as it came, and its scale.
    final_norm = (h * dim + 4 if compiled else _norm(work)) + h * dim
    # Gradients of the three matrices' inputs in the feed-forward, and of both norms in fp32.
    passing = 3 * h * config.hidden_dim + 16 * dim + _scores(work) // 2
    casts = 2 * work.parameters.matrices if autocast else 0
    if work.recompute == "off":
        kept = config.n_layers * block
    else:
        kept = config.n_layers * h * dim
        if work.recompute == "selective" and not work.plain:  # what the kernel gave
            kept += config.n_layers * (h * config.n_heads * config.head_dim + _scores(work))
        passing += block
    kept += h * work.parameters.inner if work.recompute == "off" else 0
    return Activations(
        kept=work.tokens * (kept + final_norm + 16) + casts,
        logits=_compared(work, autocast) if work.teacher else _logits(work),
        block=work.tokens * passing,
    )


def _logits(work: Workload) -> int:
    """Of the tokens that have theirs in memory together."""
    config, h = work.config, work.half
    at_once = tokens_at_once(config.vocab_size, work.tokens)
    # Log-probabilities in fp32, saved, with their gradient before and after the softmax; fused, the
    # logits as they are and their gradient.
    logits = config.vocab_size * (2 * h if work.compiled else 12)
    # In chunks: the gradient of the output layer's weights from one of them, beside their sum.
    sums = h * config.vocab_size * config.dim if at_once < work.tokens else 0
    return at_once * logits + sums


def _compared(work: Workload, autocast: bool) -> int:
    """With a teacher's: its logits, and the student's with their gradient, of all tokens, and what
    the loss keeps of a chunk. (Under autocast Accelerate hands the student's out in fp32.)"""
    logits = work.tokens * work.config.vocab_size
    student = 2 * (4 if autocast else work.half)
    return logits * (student + work.half) + min(24 * logits, COMPARED)


def _block(work: Workload) -> int:
    """All that backward needs of one block, per token."""
    config, h = work.config, work.half
    norms = 2 * (_norm(work) + h * config.dim)  # and what they give
    feed_forward = 4 * h * config.hidden_dim  # both halves of SwiGLU, silu of one, their product
    return norms + _attention(work) + feed_forward


def _norm(work: Workload) -> int:
    """Its input in fp32, its scale, and for the gradient of its weight the one over the other."""
    return (4 if work.parameters.frozen_norms else 8) * work.config.dim + 4


def _attention(work: Workload) -> int:
    """Queries, keys, values, what comes out, and weights where they are kept."""
    config, h = work.config, work.half
    heads = config.n_heads * config.head_dim
    keys = 2 * config.n_kv_heads * config.head_dim
    repeats = work.plain or not (work.on_cpu or takes_grouped_heads(getattr(torch, work.dtype)))
    if repeats:
        keys = 2 * heads
    own = h * (2 * heads + keys)
    if not (work.plain or work.on_cpu):
        own += 4 * config.n_heads  # the logarithms of the kernel's sums
    return own + _scores(work)


def _scores(work: Workload) -> int:
    """Attention weights that are kept: all T × T of plain attention in fp32, and once more in 16
    bits; of a CPU's blocks of rows what does not lie in the future."""
    config, h = work.config, work.half
    if work.plain:
        return config.n_heads * config.max_seq_len * (4 if h == 4 else 6)
    if not work.on_cpu:
        return 0
    rows = max(64, 128 // (config.n_heads // config.n_kv_heads))  # as model/cpu_attention.py has
    return config.n_heads * h * (config.max_seq_len + min(rows, config.max_seq_len)) // 2
