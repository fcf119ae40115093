"""Compute the flags of loss and optimizer that run_accelerate.sh uses.

docs/recipe.md has the measurements behind the numbers.
"""

from typing import Any

from lm.launch.recipe import BATCH, Candidate
from lm.training.rates import default_rates

# Beside Muon, AdamW's rate grows with the root of the tokens per step, up to this number.
MOST_FOR_RATE = 32768
SAMPLED_SOFTMAX = 16  # for a new model on a CPU with a micro-batch of BATCH tokens
SAMPLED_SHARE = 0.25  # of the pieces that a token is compared with, roughly
SAMPLED_FROM = 8192  # pieces; with fewer, as for a text below 4 MB, the loss compares all of them


def optimizer_flags(model: Candidate, muon: bool, batch: float = BATCH) -> dict[str, Any]:
    """Return the flags for the optimizer and schedule of a model with random weights, for steps of
    `batch` tokens."""
    optimizer, settings = "muon" if muon else "adamw", model.settings
    rates = default_rates(optimizer, settings["dim"], settings["tie_embeddings"])
    # After the warm-up the rates fall in a straight line to 0.
    schedule = {"lr_schedule": "wsd", "decay_fraction": 1.0, "min_lr_ratio": 0.0}
    if muon:
        growth = max(BATCH, min(batch, MOST_FOR_RATE)) / BATCH
        rates["learning_rate"] = rounded(rates["learning_rate"] * growth**0.5)
        schedule |= {"muon_learning_rate": 0.03 if model.parameters < 1e7 else 0.02}
    return {"optimizer": optimizer} | rates | schedule


def loss_flags(model: Candidate, pieces: int, on_gpu: bool) -> dict[str, Any]:
    """Return the flags for the loss of a model with random weights, over a vocabulary of so many
    `pieces`. In a small micro-batch each piece is compared with as many tokens as in a large one.
    --sampled_softmax was not measured on a GPU, where micro-batches are larger and have more
    different targets."""
    parts = min(SAMPLED_SOFTMAX, int(SAMPLED_SOFTMAX * model.rows * model.length / BATCH))
    return {} if on_gpu or pieces < SAMPLED_FROM or parts < 2 else {"sampled_softmax": parts}


def repetition_flags(passes: float, muon: bool) -> dict[str, Any]:
    """Return the flags that depend on the passes over the text. Repeated text needs more weight
    decay, and a larger momentum of Muon."""
    flags = {"weight_decay": rounded(min(0.5, max(0.1, 0.04 * passes)))}
    return flags | ({"muon_momentum": 0.95 if passes > 5 else 0.9} if muon else {})


def token_noise(passes: float) -> float:
    """Return the share of input tokens to replace in a text in several segmentations. Noise is for
    repeated text: 0.1 was measured at 15 passes, less for fewer passes is assumed."""
    return rounded(min(0.1, passes / 150))


def fine_tuning_rate(dim: int) -> float:
    """Return the learning rate of fine-tuning; above dim 192 it falls with the width."""
    return rounded(min(2e-3, 2e-3 * (192 / dim) ** 1.5))


def rounded(value: float) -> float:
    """Round to two significant digits."""
    return float(f"{value:.2g}")
