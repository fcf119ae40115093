"""The output layer. In training it can compare a token with a part of the vocabulary only.

The softmax of a token divides by Z, the sum of exp(logit) over all pieces (entries of the
vocabulary). In a small model this layer is about half of the work. With --sampled_softmax N the
loss estimates Z (importance sampling: Bengio and Senecal, 2003; with the targets and a few other
pieces: Jean et al., https://arxiv.org/abs/1412.2007). The pieces that are targets somewhere in a
micro-batch are compared with all its tokens. The other pieces are divided into N shares, and the
tokens into N parts. A part is compared with one share, whose pieces stand for all others:

    Z ≈ sum of exp(logit) over the targets + N · sum of exp(logit) over the share

The mean of the N estimates is Z. The mean of their logarithms is lower, so the loss is a little too
low on average. No random number is drawn. In each micro-batch of at least N tokens, each piece is
compared with some of them: with one share for all tokens, gradients were zero or too large, and
models worse.
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
    n_shared: int  # number of pieces that all tokens are compared with
    n_parts: int  # number of parts of the tokens, and of shares of the other pieces
    targets: Tensor  # int64, shaped as the targets: their places in `order`, or IGNORE_INDEX


def sample_pieces(targets: Tensor, vocab_size: int, n_parts: int) -> Sample:
    """Return the Sample of these targets, int64 of any shape. All targets are shared, and a few
    other pieces, so that the shares have equal sizes. On a GPU this waits for the GPU."""
    counted = targets != IGNORE_INDEX
    is_target = torch.zeros(vocab_size, dtype=torch.bool, device=targets.device)
    is_target[targets[counted]] = True
    order = is_target.argsort(descending=True, stable=True)
    n_others = vocab_size - int(is_target.sum())
    n_shared = vocab_size - n_others // n_parts * n_parts
    places = order.argsort()[targets.clamp_min(0)]
    return Sample(order, n_shared, n_parts, places.where(counted, IGNORE_INDEX))


class OutputLayer(nn.Linear):
    """The layer that computes the logits of x, (..., dim)."""

    def forward(self, x: Tensor, sample: Sample | None = None) -> Tensor:
        """Return the logits, (..., vocab_size). With a sample, return for each token the logits of
        the shared pieces, and of its part's share with log(n_parts) added, because each of these
        pieces counts n_parts times: (..., n_shared + (vocab_size - n_shared) / n_parts)."""
        if sample is None:
            return super().forward(x)
        _, n_shared, n_parts, _ = sample
        flat, dim = x.flatten(0, -2), x.shape[-1]  # (tokens, dim)
        weight = self.weight.index_select(0, sample.order)
        shared = F.linear(flat, weight[:n_shared])
        # Share j has the pieces j, j + n_parts, ... of the others: ids often follow frequency, so
        # each share has frequent and rare pieces. Token i belongs to part i modulo n_parts.
        shares = weight[n_shared:].view(-1, n_parts, dim).transpose(0, 1)  # (n_parts, share, dim)
        padded = F.pad(flat, (0, 0, 0, -len(flat) % n_parts))
        by_part = padded.view(-1, n_parts, dim).transpose(0, 1)  # (n_parts, tokens / n_parts, dim)
        others = (by_part @ shares.mT).transpose(0, 1).flatten(0, 1)[: len(flat)]
        logits = torch.cat([shared, others + math.log(n_parts)], dim=1)
        return logits.view(*x.shape[:-1], -1)
