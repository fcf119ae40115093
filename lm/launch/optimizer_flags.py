"""Compute the flags of loss and optimizer that run_accelerate.sh uses. Those of the learning rates
are in lm/training/schedule.py.

docs/recipe.md has the measurements behind the numbers.
"""

from typing import Any

from lm.common.numbers import rounded
from lm.launch.recipe import BATCH, Candidate
from lm.training.schedule import recipe_flags

SAMPLED_SOFTMAX = 16  # for a new model on a CPU with a micro-batch of BATCH tokens
SAMPLED_SHARE = 0.25  # of the pieces that a token is compared with, roughly
SAMPLED_FROM = 8192  # pieces; with fewer, as for a text below 4 MB, the loss compares all of them


def optimizer_flags(model: Candidate, muon: bool, batch: float = BATCH) -> dict[str, Any]:
    """Return the flags for the optimizer and schedule of a model with random weights, for steps of
    `batch` tokens."""
    settings = model.settings
    shape = settings["dim"], settings["tie_embeddings"], model.parameters
    return recipe_flags("muon" if muon else "adamw", *shape, batch)


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
