"""Sampling: the settings with their limits, and the choice of the next token from the logits."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LIMITS = {  # setting: (test of a value, the same limit in words)
    "repetition_penalty": (lambda penalty: 0 < penalty < math.inf, "positive and finite"),
    "temperature": (lambda temperature: 0 <= temperature < math.inf, "at least 0 and finite"),
    "top_k": (lambda k: k >= 0, "at least 0"),
    "top_p": (lambda p: 0 < p <= 1, "above 0 and at most 1"),
    "min_p": (lambda p: 0 <= p <= 1, "between 0 and 1"),
    "seed": (lambda seed: 0 <= seed < 2**63, "at least 0 and below 2**63"),
}
MEANINGS = {  # setting: help text of its flag
    # Source: Keskar et al., https://arxiv.org/abs/1909.05858
    "repetition_penalty": "divides positive logits of tokens in the text, multiplies negative ones",
    "temperature": "divides the logits; 0 always takes the likeliest token",
    "top_k": "keep the k likeliest tokens; 0 keeps all",
    # Source: Holtzman et al., https://arxiv.org/abs/1904.09751
    "top_p": "keep the likeliest tokens until their probabilities sum to this value",
    # Source: Nguyen et al., https://arxiv.org/abs/2407.01082
    "min_p": "keep tokens with at least this share of the highest probability",
}


@dataclass(frozen=True)
class Sampling:
    """Sampling settings, applied in the order of the fields; see MEANINGS and LIMITS. Raises
    ValueError if a value is out of its limits; the message begins with the setting's name."""

    repetition_penalty: float = 1.0
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = field(default=0, compare=False)

    def __post_init__(self):
        for setting in fields(self):
            value = getattr(self, setting.name)
            is_allowed, limits = LIMITS[setting.name]
            if not is_allowed(value):
                raise ValueError(f"{setting.name} must be {limits}, not {value!r}")

    def numbered(self, i: int) -> "Sampling":
        """Return these settings with seed + i, for continuation i."""
        return replace(self, seed=(self.seed + i) % 2**63)


def penalise(logits: "Tensor", texts: list[list[int]], penalty: float) -> "Tensor":
    """Return a copy of the logits, (B, vocab_size). Penalise the tokens of texts[i] in row i."""
    logits = logits.clone()
    for row, text in zip(logits, texts, strict=True):
        seen = row[text]
        row[text] = (seen / penalty).where(seen > 0, seen * penalty)
    return logits


def choose(logits: "Tensor", sampling: Sampling, numbers: "Tensor") -> "Tensor":
    """Draw one token per row and return the tokens, (B,). The tokens of a row are ordered from the
    likeliest on; the first whose cumulative probability exceeds the row's number is drawn.
    logits are (B, vocab_size) in fp32, after `penalise`; numbers are (B,), random in [0, 1)."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    count = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    best, ids = logits.topk(count)  # (B, count) each, the likeliest first
    p = (best.double() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        before = p.cumsum(-1) - p
        p = p.masked_fill(before >= sampling.top_p, 0)
    if sampling.min_p > 0:
        p = p.masked_fill(p < sampling.min_p * p[:, :1], 0)
    sums = p.cumsum(-1)
    chosen = (sums <= numbers[:, None] * sums[:, -1:]).sum(-1)
    return ids.gather(-1, chosen[:, None])[:, 0]
