"""Gradient checkpointing: what backward needs of a block is computed again there, and not kept.

Of each block only its input then stays from forward to backward, and one block at a time has all
the rest; for that, forward is computed twice. Source: Chen et al.,
https://arxiv.org/abs/1604.06174.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from model import cpu_attention  # noqa: F401  it registers the first of these

RECOMPUTE = ("off", "blocks", "selective")
# What the fast paths of attention end in. Those of GPUs have names inside PyTorch only.
ATTENTION = [
    torch.ops.small_lm.row_block_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]


def recomputed(block: Callable, x: Tensor, other: Tensor, what: str) -> Tensor | tuple[Tensor, ...]:
    """Return block(x, other), and compute it again in backward.

    With "blocks" all of it is computed again, with "selective" all but attention, with "off"
    nothing. Random numbers are drawn as the first time, so that
    gradients are the same.
    """
    if what == "off" or not torch.is_grad_enabled():
        return block(x, other)
    options = {"context_fn": keep_attention} if what == "selective" else {}
    return checkpoint(block, x, other, use_reentrant=False, **options)


def keep_attention():
    return create_selective_checkpoint_contexts(ATTENTION)
