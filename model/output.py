"""The output layer. In training it can compare a token with a part of the vocabulary only.

For a small model with a large vocabulary this layer is most of the work. With --sampled_softmax 8,
all tokens of a micro-batch are compared with the pieces that are targets somewhere in it, and each
eighth of the tokens with another eighth of the other pieces.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.loss import IGNORE_INDEX


class Sample(NamedTuple):
    """Which pieces of the vocabulary the loss of some tokens compares."""

    order: Tensor  # (vocab_size,) int64: all pieces, with the shared ones first
    shared: int  # number of pieces that all tokens are compared with
    parts: int  # of the tokens; each part is compared with another share of the other pieces
    targets: Tensor  # int64, shaped as the targets: their places in `order`, or IGNORE_INDEX


def sample_pieces(targets: Tensor, vocab_size: int, parts: int) -> Sample:
    """Divide the pieces for a loss that compares tokens with all targets of these tokens, and each
    of `parts` parts of the tokens with one of as many parts of the other pieces.

    Each of the other pieces stands for `parts` pieces in the denominator of the softmax, which is
    then right on average (importance sampling: Bengio and Senecal, 2003; for the targets and few
    other pieces: Jean et al., https://arxiv.org/abs/1412.2007). The targets decide, no random
    number does. A few other pieces are shared, so that the rest can be divided evenly. On a GPU
    this waits for the GPU."""
    counts = targets != IGNORE_INDEX
    is_target = torch.zeros(vocab_size, dtype=torch.bool, device=targets.device)
    is_target[targets[counts]] = True
    order = torch.cat([is_target.nonzero(), (~is_target).nonzero()]).flatten()
    shared = int(is_target.sum())
    shared += (vocab_size - shared) % parts
    places = torch.empty_like(order)
    places[order] = torch.arange(vocab_size, device=order.device)
    return Sample(order, shared, parts, places[targets.clamp_min(0)].where(counts, IGNORE_INDEX))


class OutputLayer(nn.Linear):
    """The layer that computes the logits, without a bias."""

    def __init__(self, dim: int, vocab_size: int):
        super().__init__(dim, vocab_size, bias=False)

    def forward(self, x: Tensor, sample: Sample | None = None) -> Tensor:
        """Return the logits of x (..., dim), shaped (..., vocab_size). With a sample, return those
        of its shared pieces, and then those of the share of x's part, with the log of the number
        of parts added: (..., shared + (vocab_size - shared) / parts)."""
        if sample is None:
            return super().forward(x)
        flat, dim = x.flatten(0, -2), x.shape[-1]  # (tokens, dim)
        weight = self.weight.index_select(0, sample.order)
        shared = F.linear(flat, weight[: sample.shared])
        # Token i belongs to part i modulo `parts`, so that each part has tokens of all sequences.
        padded = F.pad(flat, (0, 0, 0, -len(flat) % sample.parts))
        by_part = padded.view(-1, sample.parts, dim).transpose(0, 1)
        share = (len(weight) - sample.shared) // sample.parts
        shares = weight[sample.shared :].view(sample.parts, share, dim)
        others = (by_part @ shares.mT).transpose(0, 1).flatten(0, 1)[: len(flat)]
        logits = torch.cat([shared, others + math.log(sample.parts)], dim=1)
        return logits.view(*x.shape[:-1], -1)
