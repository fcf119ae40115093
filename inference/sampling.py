"""Which token comes next: one draw from each row of logits."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to draw. What is left out is left out in the order of the fields. Raises ValueError: a
    value that cannot work; the message begins with its name."""

    repetition_penalty: float = 1.0  # divides positive logits of tokens already in the text, and
    # multiplies negative ones. Source: Keskar et al., https://arxiv.org/abs/1909.05858
    temperature: float = 0.8  # divides the logits; 0 always takes the likeliest token
    top_k: int = 50  # only so many of the likeliest; 0 takes all
    top_p: float = 1.0  # only the likeliest that together have this probability.
    # Source: Holtzman et al., https://arxiv.org/abs/1904.09751
    min_p: float = 0.0  # only those with this share of the likeliest one's probability.
    # Source: Nguyen et al., https://arxiv.org/abs/2407.01082
    seed: int = 0

    def __post_init__(self):
        for name, holds, what in (
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "positive and finite"),
            ("temperature", 0 <= self.temperature < math.inf, "at least 0 and finite"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("seed", 0 <= self.seed < 2**63, "at least 0 and below 2**63"),
        ):
            if not holds:
                raise ValueError(f"{name} must be {what}, not {getattr(self, name)!r}")


class Sampler:
    """Draws for some sequences, each with random numbers of its own: row i has those of seed + i,
    whatever else is in the batch.

    Args:
        texts: token ids of each sequence so far, which `repetition_penalty` looks at.
    """

    def __init__(
        self,
        sampling: Sampling,
        texts: list[list[int]],
        vocab_size: int,
        device: torch.device,
    ):
        self.sampling, self.device = sampling, device
        self.generators = [
            torch.Generator().manual_seed((sampling.seed + i) % 2**63) for i in range(len(texts))
        ]
        self.present = None
        if sampling.repetition_penalty != 1:
            self.present = torch.zeros(len(texts), vocab_size, dtype=torch.bool, device=device)
            for row, text in enumerate(texts):
                self.present[row, text] = True

    def keep(self, rows: list[int]) -> None:
        """Go on with these sequences only."""
        self.generators = [self.generators[row] for row in rows]
        if self.present is not None:
            self.present = self.present[rows]

    def __call__(self, logits: Tensor) -> Tensor:
        """The next token of each row: (B, vocab_size) fp32 → (B,) int64."""
        if self.present is not None:
            logits = penalise(logits, self.present, self.sampling.repetition_penalty)
        numbers = torch.stack(
            [torch.rand((), generator=g, dtype=torch.float64) for g in self.generators]
        )
        tokens = choose(logits, self.sampling, numbers.to(self.device))
        if self.present is not None:
            self.present[torch.arange(len(tokens), device=tokens.device), tokens] = True
        return tokens


def penalise(logits: Tensor, present: Tensor, penalty: float) -> Tensor:
    """Make what is present, (B, vocab_size) bool, less likely."""
    return torch.where(present, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def choose(logits: Tensor, sampling: Sampling, numbers: Tensor) -> Tensor:
    """Tokens where the sums of probabilities pass the numbers, (B,) in [0, 1)."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    count = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    best, ids = logits.topk(count)  # the likeliest first
    p = torch.softmax(best.double() / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        before = p.cumsum(-1) - p
        p = p.masked_fill(before >= sampling.top_p, 0)
    if sampling.min_p > 0:
        p = p.masked_fill(p < sampling.min_p * p[:, :1], 0)
    sums = p.cumsum(-1)
    chosen = (sums <= numbers[:, None] * sums[:, -1:]).sum(-1)
    return ids.gather(-1, chosen[:, None])[:, 0]
