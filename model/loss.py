"""The loss: cross-entropy of the next token, without all logits of a large vocabulary in memory.

With log-probabilities and gradients a logit takes up to 12 bytes: 2.4 GB for 8 sequences of 512
tokens and 49,152 pieces. Above LARGE_VOCABULARY at most CHUNK_LOGITS are made at a time, and
backward computes them again, which adds a third to the output layer's products.
"""

from torch import Tensor, nn
from torch.nn import functional as F

IGNORE_INDEX = -100  # a target with this id does not count in the loss
LARGE_VOCABULARY = 1 << 15
CHUNK_LOGITS = 1 << 25  # 400 MB with all that they take


class TokenLoss(nn.Module):
    """Cross-entropy in fp32; a module without parameters, so that it can be compiled on its own."""

    def forward(self, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction=reduction,
        )
        return loss if reduction == "mean" else loss.view_as(targets)


def tokens_at_once(vocab_size: int, tokens: int) -> int:
    """Return how many of these tokens have their logits in memory together."""
    if vocab_size <= LARGE_VOCABULARY:
        return tokens
    chunks = -(-tokens * vocab_size // CHUNK_LOGITS)
    return -(-tokens // chunks)  # all but the last equally many
