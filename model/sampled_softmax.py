"""A training loss that compares a token with a part of the vocabulary only: --sampled_softmax N.

The softmax of a token divides by Z, the sum of exp(logit) over all pieces (entries of the
vocabulary). In a small model the output layer is about half of the work. With N above 1 the loss
estimates Z (importance sampling: Bengio and Senecal, 2003; with the targets and a few other
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

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.loss import IGNORE_INDEX, NextTokenLoss
from model.transformer import Transformer


def sample_softmax(model: Transformer, n_parts: int) -> None:
    """Let training estimate the loss. Evaluation and generation use the whole vocabulary."""
    model.output = SampledOutput(model.output, n_parts)
    model.next_token_loss = SampledLoss()


class SampledLoss(NextTokenLoss):
    """In training the estimate, otherwise the loss itself. The output layer is SampledOutput."""

    def n_logits(self, output: nn.Linear, n_tokens: int) -> int:
        pieces = output.out_features
        targeted = min(pieces, n_tokens)  # at most so many pieces are targets
        return targeted + (pieces - targeted) // (output.n_parts if self.training else 1)

    def logits(self, output: nn.Linear, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return output(x, targets) if self.training else super().logits(output, x, targets)


class SampledOutput(nn.Linear):
    """An output layer with the weight of `base`. It computes the logits of x, (..., dim)."""

    def __init__(self, base: nn.Linear, n_parts: int):
        nn.Module.__init__(self)  # nn.Linear.__init__ would allocate a new weight
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, None
        self.weight, self.n_parts = base.weight, n_parts

    def forward(self, x: Tensor, targets: Tensor | None = None):
        """Return the logits, (..., vocab_size). With the targets of x (tokens, dim), int64, return
        the logits that a sampled loss compares, (tokens, fewer), and the places of the targets
        among them. This waits for a GPU. ZeRO-3 gathers the weight only for this method."""
        if targets is None:
            return super().forward(x)
        n_parts, dim = self.n_parts, self.in_features
        counted = targets != IGNORE_INDEX
        is_target = torch.zeros(len(self.weight), dtype=torch.bool, device=x.device)
        is_target[targets[counted]] = True
        n_targets, total = torch.stack([is_target.sum(), targets[counted].sum()]).tolist()
        # All tokens share the targets, and a few other pieces, so that the shares have equal sizes.
        n_shared = len(self.weight) - (len(self.weight) - n_targets) // n_parts * n_parts
        pieces = is_target.argsort(descending=True, stable=True)
        places = pieces.argsort()[targets.clamp_min(0)].where(counted, IGNORE_INDEX)
        # Share j has the pieces j, j + n_parts, ... of the others: ids often follow frequency, so
        # each share has frequent and rare pieces. Part i of the tokens, which are i, i + n_parts,
        # ..., meets share i + the sum of the targets: another one in another micro-batch.
        others = pieces[n_shared:].view(-1, n_parts).roll(-(total % n_parts), dims=1)
        weight = self.weight.index_select(0, torch.cat([pieces[:n_shared], others.flatten()]))
        shares = weight[n_shared:].view(-1, n_parts, dim).transpose(0, 1)  # (n_parts, share, dim)
        padded = F.pad(x, (0, 0, 0, -len(x) % n_parts))
        by_part = padded.view(-1, n_parts, dim).transpose(0, 1)  # (n_parts, tokens / n_parts, dim)
        of_shares = (by_part @ shares.mT).transpose(0, 1).flatten(0, 1)[: len(x)]
        shared = F.linear(x, weight[:n_shared])
        # Each piece of a share stands for n_parts pieces.
        return torch.cat([shared, of_shares + math.log(n_parts)], dim=1), places
