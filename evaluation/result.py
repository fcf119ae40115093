"""Results: ratios with their 95% intervals, and the text for people.

Tokens of one document resemble each other, so they are no independent observations: an interval
from the spread of single tokens would be far too narrow. The unit here is what was drawn
independently: a document, a conversation or a question.
"""

import math
from collections.abc import Callable

import numpy as np

from common.numbers import counted

LEAST_UNITS = 3
METRICS = {  # the format of their numbers, and an explanation
    "loss": (".4f", "nats per token"),
    "perplexity": (".2f", ""),
    "bits_per_byte": (".4f", ""),
    "accuracy": (".2%", "of next tokens are the likeliest one"),
    "acc": (".2%", "by log-likelihood of the choice"),
    "acc_norm": (".2%", "by log-likelihood per byte of it"),
    "chance": (".2%", "what guessing gives"),
}
# Conversations are cut after the last answer within the context; questions lose their beginning.
AMOUNTS = ("tokens", "bytes", "sequences", "cut", "left_out", "truncated")
HOW = ("max_seq_len", "stride", "delimiter", "template")


def ratio(
    tops: np.ndarray, bottoms: np.ndarray, scale: Callable[[float], float] = float
) -> dict[str, float | None]:
    """Return total over total, as loss is nats over tokens, as "value", and the ends of its
    interval, "low" and "high": None for fewer than LEAST_UNITS units.

    Units differ in length, so both totals are random: with R the ratio and n units, the variance of
    R is about n / (n - 1) · Σ (top - R · bottom)² / (Σ bottom)² (Cochran, Sampling Techniques, 3rd
    ed. 1977, section 6.4). The interval is R ± 1.96 standard errors, and does not reach below 0.

    Args:
        tops, bottoms: float64 of shape (units,), none negative.
        scale: an increasing function for the number and the ends of its interval.
    """
    n, total = len(tops), sum(bottoms)
    r = sum(tops) / total
    if n < LEAST_UNITS:
        return {"value": scale(r), "low": None, "high": None}
    squares = np.square(tops - r * bottoms).sum()
    half = 1.96 * math.sqrt(n / (n - 1) * squares) / total
    return {"value": scale(r), "low": scale(max(0.0, r - half)), "high": scale(r + half)}


def report(result: dict) -> str:
    """Return one model's numbers, each with its 95% interval, and how they were measured."""
    units = counted(result["units"], result["unit"])
    amounts = [f"{result[name]:,} {name.replace('_', ' ')}" for name in AMOUNTS if result.get(name)]
    how = [f"{name} {result[name]!r}" for name in HOW if result[name] is not None]
    run = f"{result['dtype']}, {result['processes']} × {result['device']}"
    if result["zero_stage"]:
        run += f", weights divided by ZeRO-{result['zero_stage']}"
    rows = {
        "model": f"{result['model']} ({result['parameters'] / 1e6:.2f} million parameters)",
        "data": result["data"] + (f", {result['split']} split" if result["split"] else ""),
        "scored": ", ".join([units, *amounts]),
        "how": ", ".join([result["task"], *how]),
        "run": f"{run}, {result['seconds']:.1f} s",
    }
    for name, metric in result["metrics"].items():
        form, explanation = METRICS[name]
        value, low, high = (metric[key] for key in ("value", "low", "high"))
        interval = "" if low in (None, value) else f"  ({low:{form}} to {high:{form}})"
        rows[name] = f"{value:{form}}{interval}  {explanation}".rstrip()
    rows["interval"] = f"95%, by the spread among {units}; none for fewer than {LEAST_UNITS}"
    return "\n".join(f"{name:>13}: {text}" for name, text in rows.items())
