"""Compute the flags of loss and optimizer that run_accelerate.sh uses for a new model. Those of the
learning rates are in lm/training/schedule.py.

docs/recipe.md has the measurements behind the numbers.
"""

from typing import Any

from lm.common.numbers import rounded
from lm.launch.recipe import BATCH, Candidate
from lm.training.schedule import recipe_flags

SAMPLED_SOFTMAX = 16  # on a CPU with a micro-batch of BATCH tokens
SAMPLED_SHARE = 0.25  # of the pieces that a token is compared with, roughly
SAMPLED_FROM = 8192  # pieces; with fewer, as for a text below 4 MB, the loss compares all of them


def optimizer_flags(
    model: Candidate, muon: bool, batch: float = BATCH, passes: float = 1
) -> dict[str, Any]:
    """Return the flags for the optimizer and schedule, for steps of `batch` tokens and so many
    `passes` over the text. Repeated text needs more weight decay, and a larger momentum of Muon."""
    shape = model.settings["dim"], model.settings["tie_embeddings"], model.counted
    flags = recipe_flags("muon" if muon else "adamw", *shape, batch)
    flags["weight_decay"] = rounded(min(0.5, max(0.1, 0.04 * passes)))
    return flags | ({"muon_momentum": 0.95 if passes > 5 else 0.9} if muon else {})


def loss_flags(model: Candidate, pieces: int, on_gpu: bool) -> dict[str, Any]:
    """Return the flags for the loss over a vocabulary of so many `pieces`. In a small micro-batch
    each piece is compared with as many tokens as in a large one. --sampled_softmax was not measured
    on a GPU, where micro-batches are larger and have more different targets."""
    parts = min(SAMPLED_SOFTMAX, int(SAMPLED_SOFTMAX * model.rows * model.length / BATCH))
    return {} if on_gpu or pieces < SAMPLED_FROM or parts < 2 else {"sampled_softmax": parts}
