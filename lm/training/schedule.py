"""The learning rate of a run: the defaults of its flags, and the rate of each step.

A typed flag decides. Otherwise a resumed run keeps its own rates (`lm/training/resume.py`), and the
"scheduler" of a DeepSpeed file decides (`lm/engine/deepspeed_config.py`). Otherwise the defaults
depend on the optimizer, on the model's width, and on where the weights come from. docs/recipe.md
has the measurements behind the numbers.
"""

import math
from typing import Any

from lm.common.errors import UsageError
from lm.common.numbers import rounded

# The defaults for a run that starts from existing weights, or whose --learning_rate is typed: one
# rate for all layers. Fine-tuning has a lower rate.
FROM_WEIGHTS = {
    "learning_rate": 5e-4,
    "embedding_lr_factor": 1.0,
    "output_lr_factor": 1.0,
    "warmup_fraction": 0.05,
}
FINE_TUNING_RATE = 1e-4
MAX_DEFAULT_WARMUP = 2000  # steps
# The rates suit steps of BATCH tokens. Beside Muon, the recipe lets AdamW's rate grow with the root
# of the tokens per step, up to MOST_FOR_RATE tokens.
BATCH, MOST_FOR_RATE = 4096, 32768


def default_rates(optimizer: str, dim: int, tied: bool, batch: float = BATCH) -> dict[str, float]:
    """Return the defaults of --learning_rate, --embedding_lr_factor, --output_lr_factor and
    --warmup_fraction for a model with random weights: beside Muon, or for AdamW alone. `tied` means
    that the input embedding and the output layer share one matrix, which then learns as an
    embedding. `batch` is the number of tokens per step, if the rate may depend on it."""
    dim = max(1, dim)  # the model refuses other values
    if optimizer == "muon":
        rate, warmup = rounded((0.02 if tied else 0.03) * (128 / dim) ** 0.5), 0.05
        rate = rounded(rate * (max(BATCH, min(batch, MOST_FOR_RATE)) / BATCH) ** 0.5)
        embedding, output = (1.0, 1.0) if tied else (3.0, 0.5)
    else:
        rate, warmup = rounded(0.0045 * 128 / dim), 0.25
        embedding, output = 10.0, 1.0 if tied else 4.0
    return {
        "learning_rate": rate,
        "embedding_lr_factor": embedding,
        "output_lr_factor": output,
        "warmup_fraction": warmup,
    }


def recipe_flags(
    optimizer: str, dim: int, tied: bool, parameters: int, batch: float = BATCH, passes: float = 1
) -> dict[str, Any]:
    """Return the flags of run_accelerate.sh for the optimizer and the schedule of a model with
    random weights, in steps of `batch` tokens and so many `passes` over the text: after the warm-up
    the rates fall in a straight line to 0. Repeated text needs more weight decay, and a larger
    momentum of Muon. `parameters` are those that the recipe counts."""
    flags = {"optimizer": optimizer} | default_rates(optimizer, dim, tied, batch)
    flags |= {"lr_schedule": "wsd", "decay_fraction": 1.0, "min_lr_ratio": 0.0}
    flags["weight_decay"] = rounded(min(0.5, max(0.1, 0.04 * passes)))
    if optimizer == "muon":
        flags["muon_learning_rate"] = 0.03 if parameters < 1e7 else 0.02
        flags["muon_momentum"] = 0.95 if passes > 5 else 0.9
    return flags


def fine_tuning_rate(dim: int) -> float:
    """Return run_accelerate.sh's rate for fine-tuning; above dim 192 it falls with the width."""
    return rounded(min(2e-3, 2e-3 * (192 / dim) ** 1.5))


class LearningRate:
    """Learning rate as a function of the step, counted from 1. It has no state to restore.

    The rate rises linearly to its peak at step `warmup_steps`. With "constant", or with "wsd" and a
    decay_fraction of 0, it stays there. Otherwise it falls to min_ratio * peak at the last step:
    - cosine: along half a cosine wave (Loshchilov and Hutter, https://arxiv.org/abs/1608.03983);
    - linear: along a straight line;
    - wsd: along a straight line in the last decay_fraction of all steps; between the warm-up and
      these steps the rate is constant (Hu et al., https://arxiv.org/abs/2404.06395).

    `args` are TrainingArguments. Raises UsageError if the warm-up is longer than the run.
    """

    def __init__(self, args, total_steps: int):
        self.schedule, self.total_steps = args.lr_schedule, total_steps
        self.peak, self.min_ratio = args.learning_rate, args.min_lr_ratio
        default = min(MAX_DEFAULT_WARMUP, int(args.warmup_fraction * total_steps))
        self.warmup_steps = default if args.warmup_steps is None else args.warmup_steps
        if (warmup := self.warmup_steps) > total_steps:
            short = f"the whole run has {total_steps} steps, pass fewer"
            raise UsageError(f"--warmup_steps {warmup}: {short}")
        decay = round(args.decay_fraction * total_steps)  # length of wsd's decay
        ends = {"constant": total_steps, "wsd": total_steps - decay}  # of the constant phase
        self.last_at_peak = max(self.warmup_steps, ends.get(self.schedule, 0))  # a step

    def __call__(self, step: int) -> float:
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if step <= self.last_at_peak:
            return self.peak
        progress = (step - self.last_at_peak) / (self.total_steps - self.last_at_peak)
        wave = 0.5 * (1 + math.cos(math.pi * progress))
        share = wave if self.schedule == "cosine" else 1 - progress
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * share)
