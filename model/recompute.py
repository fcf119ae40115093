"""Gradient checkpointing: backward computes a block again instead of keeping what forward made.

Only the input of each block stays from forward to backward. Forward is computed twice. Source: Chen
et al., https://arxiv.org/abs/1604.06174.
"""

from collections.abc import Callable
from functools import partial

import torch
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


def recomputed(block: Callable, what: str, *inputs):
    """Return block(*inputs), and compute it again in backward, with the same random numbers.

    With "blocks" all of it is computed again, with "selective" all but attention, with "off"
    nothing.
    """
    if what == "off" or not torch.is_grad_enabled():
        return block(*inputs)
    contexts = partial(create_selective_checkpoint_contexts, ATTENTION)
    options = {"context_fn": contexts} if what == "selective" else {}
    return checkpoint(block, *inputs, use_reentrant=False, **options)
