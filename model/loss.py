"""Cross-entropy of the next token, without holding all logits of a large vocabulary in memory.

A logit, its log-probability and its gradient take up to 4 bytes each. For 32 sequences of 512
tokens and a vocabulary of 49,152 this is 9.7 GB. Above LARGE_VOCABULARY the loss is therefore
computed in chunks of at most about CHUNK_LOGITS logits. With two or more chunks, backward computes
the logits again, which adds a third to the matrix products of the output layer, and each chunk
writes a gradient as large as the output weight. A GPU uses larger chunks, to write fewer of these
gradients. The size of a chunk depends on the kind of device, not on its free memory, so that a
resumed run rounds in the same way.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORE_INDEX = -100  # a target with this id does not count in the loss
LARGE_VOCABULARY = 1 << 15
CHUNK_LOGITS = 1 << 25  # on a CPU: 400 MB at 12 bytes
GPU_CHUNK_LOGITS = 1 << 28  # 3.2 GB at 12 bytes; compiled 1.1 GB: 16-bit logit and gradient


class TokenLoss(nn.Module):
    """Cross-entropy in fp32. It is a module, so that it can be compiled separately."""

    def forward(self, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Return the mean loss of logits (B, T, pieces), or with "none" all losses, (B, T)."""
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(),  # (B · T, pieces)
            targets.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction=reduction,
        )
        return loss if reduction == "mean" else loss.view_as(targets)


def tokens_at_once(vocab_size: int, tokens: int, device: torch.device) -> int:
    """Return how many of `tokens` tokens pass through the output layer in one chunk."""
    if vocab_size <= LARGE_VOCABULARY:
        return tokens
    most = CHUNK_LOGITS if device.type == "cpu" else GPU_CHUNK_LOGITS
    chunks = -(-tokens * vocab_size // most)  # rounded up
    return -(-tokens // chunks)  # chunks of equal size; only the last may be smaller
