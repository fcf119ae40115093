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

from model.recompute import recomputed

IGNORE_INDEX = -100  # a target with this id does not count in the loss
LARGE_VOCABULARY = 1 << 15
CHUNK_LOGITS = 1 << 25  # on a CPU: 400 MB at 12 bytes
GPU_CHUNK_LOGITS = 1 << 28  # 3.2 GB at 12 bytes; compiled 1.1 GB: 16-bit logit and gradient


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Return the mean loss of logits (tokens, pieces), in fp32, or with "none" all losses."""
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction=reduction)


def tokens_at_once(n_logits: int, tokens: int, device: torch.device) -> int:
    """Return how many of `tokens` tokens, with n_logits logits each, form one chunk."""
    if n_logits <= LARGE_VOCABULARY:
        return tokens
    most = CHUNK_LOGITS if device.type == "cpu" else GPU_CHUNK_LOGITS
    chunks = -(-tokens * n_logits // most)  # rounded up
    return -(-tokens // chunks)  # chunks of equal size; only the last may be smaller


class NextTokenLoss(nn.Module):
    """The loss of what the last norm returns, x. It has no weights: `output` is the output layer.
    `cross_entropy` can be compiled. `SampledLoss` in model/sampled_softmax.py is a variant."""

    def __init__(self):
        super().__init__()
        self.cross_entropy = cross_entropy

    def forward(
        self, output: nn.Linear, x: Tensor, targets: Tensor, reduction: str
    ) -> tuple[Tensor, Tensor | None]:
        """Return the mean loss of x, (B, T, dim), and None; or with reduction "none" the loss of
        each position, and whether its target was the likeliest token, (B, T) each."""
        tokens, flat_targets = x.flatten(0, 1), targets.flatten()
        size = tokens_at_once(self.n_logits(output, len(tokens)), len(tokens), x.device)
        if size == len(tokens) and reduction == "mean":
            return self.cross_entropy(*self.logits(output, tokens, flat_targets), "mean"), None

        def score(x: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            logits, targets = self.logits(output, x, targets)
            losses = self.cross_entropy(logits, targets, "none")
            return (losses,) if reduction == "mean" else (losses, logits.argmax(dim=-1) == targets)

        recompute = "off" if size == len(tokens) else "blocks"
        chunks = zip(tokens.split(size), flat_targets.split(size), strict=True)
        scored = [recomputed(score, recompute, *chunk) for chunk in chunks]
        losses, *hits = (torch.cat(parts).view_as(targets) for parts in zip(*scored, strict=True))
        if reduction == "mean":
            return losses.sum() / (targets != IGNORE_INDEX).sum(), None
        return losses, hits[0]

    def n_logits(self, output: nn.Linear, n_tokens: int) -> int:
        """Return about how many logits each of n_tokens tokens has at most."""
        return output.out_features

    def logits(self, output: nn.Linear, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of x, (tokens, pieces), and the places of the targets among them."""
        return output(x), targets
