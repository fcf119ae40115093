"""Gradient checkpointing: forward does not keep the tensors of a block, backward recomputes them.

With "blocks", memory holds only the input of each block until backward. In return, the forward
pass of each block is computed twice. Source: Chen et al., https://arxiv.org/abs/1604.06174.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from model import cpu_attention  # noqa: F401  this import registers row_block_attention

RECOMPUTE = ("off", "blocks", "selective")
# The operations that compute fast attention: one on a CPU, three of PyTorch's on a GPU.
ATTENTION = [
    torch.ops.small_lm.row_block_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]


def recomputed(block: Callable, what: str, *inputs):
    """Return block(*inputs), and let backward compute it again with the same random numbers.

    `what` is one of RECOMPUTE: "blocks" recomputes everything, "selective" everything except
    the operations in ATTENTION, "off" nothing."""
    if what == "off" or not torch.is_grad_enabled():
        return block(*inputs)
    if what == "blocks":
        return checkpoint(block, *inputs, use_reentrant=False)
    keep_attention = partial(create_selective_checkpoint_contexts, ATTENTION)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=keep_attention)
