"""The learning rate as a function of the step, so that a resumed run needs nothing restored."""

import math
from dataclasses import dataclass

from common.errors import UsageError
from training.arguments import TrainingArguments

MAX_DEFAULT_WARMUP = 2000


def count_steps(args: TrainingArguments, n_samples: int, processes: int) -> int:
    """Return the optimizer steps of the whole run: --max_steps, or those of --epochs."""
    return args.max_steps or math.ceil(args.epochs * n_samples / args.global_batch(processes))


@dataclass(frozen=True)
class LearningRate:
    """Learning rate of an optimizer step, counted from 1.

    Linear warm-up reaches the peak at step `warmup_steps`. Then
    - cosine: half a cosine wave down to min_ratio·peak at the last step (Loshchilov and Hutter,
      https://arxiv.org/abs/1608.03983);
    - linear: straight down to min_ratio·peak at the last step;
    - constant: the peak;
    - wsd: the peak, and over the last decay_fraction of all steps linearly down to min_ratio·peak
      (warm-up, stable, decay; Hu et al., https://arxiv.org/abs/2404.06395).
    """

    peak: float
    total_steps: int
    warmup_steps: int
    schedule: str = "cosine"
    min_ratio: float = 0.1
    decay_fraction: float = 0.2

    def __call__(self, step: int) -> float:
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        start = self.warmup_steps
        if self.schedule == "wsd":
            start = max(start, self.total_steps - round(self.decay_fraction * self.total_steps))
            if step <= start:
                return self.peak
        progress = min(1.0, (step - start) / max(1, self.total_steps - start))
        wave = 0.5 * (1 + math.cos(math.pi * progress))
        share = wave if self.schedule == "cosine" else 1 - progress
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * share)

    @classmethod
    def from_arguments(cls, args: TrainingArguments, total_steps: int) -> "LearningRate":
        """Return the schedule of a run. Raises UsageError: warm-up beyond the last step."""
        warmup, schedule = args.warmup_steps, args.lr_schedule or "cosine"
        if warmup is None:
            warmup = min(MAX_DEFAULT_WARMUP, total_steps // 20)
        if warmup > total_steps:
            raise UsageError(f"--warmup_steps {warmup}: the whole run has {total_steps} steps")
        end = args.min_lr_ratio, args.decay_fraction
        return cls(args.learning_rate, total_steps, warmup, schedule, *end)
