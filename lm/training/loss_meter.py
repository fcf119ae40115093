"""The mean of the loss that a log line shows."""

import torch
from accelerate import Accelerator
from torch import Tensor


class LossMeter:
    """Weighted means of the loss and of `parts` since the last `take`, without steps whose gradient
    norm is not finite. On a GPU, `add` never waits; `end_step` waits if the norm is a float."""

    def __init__(self, accelerator: Accelerator, parts: tuple[str, ...] = ()):
        self.accelerator = accelerator
        self.names = ("loss", *parts, "weight")
        self._saved_names = [f"log.{name}" for name in (*self.names, "skipped_steps")]
        # Weighted sums of the values. The last element is the sum of the weights.
        self._step = torch.zeros(len(self.names), device=accelerator.device)  # in this step
        self._sums = torch.zeros_like(self._step)  # in the steps since the last `take`
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=accelerator.device)
        self.bad_in_row = torch.zeros_like(self.skipped_steps)  # skipped since the last good step
        self.worst_in_row = torch.zeros_like(self.skipped_steps)  # the largest `bad_in_row` so far

    def add(self, weight: float, **means: Tensor) -> None:
        """Add mean values (detached) of a micro-batch. `weight` is the number of its targets
        that count, divided by batch_size * seq_len."""
        self._step[:-1].add_(torch.stack([means[name] for name in self.names[:-1]]), alpha=weight)
        self._step[-1] += weight

    def end_step(self, grad_norm: float | Tensor) -> None:
        """Add the step's sums, or count the step as skipped if its gradient norm is not finite."""
        good = torch.as_tensor(grad_norm, device=self._step.device).isfinite()
        self._sums += self._step.where(good, 0.0)
        self.bad_in_row = (self.bad_in_row + 1).where(~good, 0)
        self.worst_in_row = torch.maximum(self.worst_in_row, self.bad_in_row)
        self.skipped_steps += ~good
        self._step.zero_()

    def take(self) -> dict[str, float | None]:
        """Return the means over all processes since the last call. A mean is None if every step was
        skipped or had no target that counts. Every process must call this."""
        *totals, weight = self.accelerator.reduce(self._sums.clone()).tolist()
        self._sums.zero_()
        means = [total / weight if weight else None for total in totals]
        return dict(zip(self.names[:-1], means, strict=True))

    def state(self) -> dict[str, Tensor]:
        """Return this process's sums and the number of skipped steps, named as in a checkpoint."""
        values = torch.tensor([*self._sums.tolist(), self.skipped_steps], dtype=torch.float64)
        return {name: values[i].clone() for i, name in enumerate(self._saved_names)}

    def load_state(self, ranks: list[dict[str, Tensor]], rank: int) -> None:
        """Continue from the state of each rank in a checkpoint. If the number of ranks has
        changed, the first process takes the sums of all ranks."""
        saved = [torch.stack([each[name] for name in self._saved_names]) for each in ranks]
        same = len(ranks) == self.accelerator.num_processes
        self._sums.copy_((saved[rank] if same else sum(saved) * (rank == 0))[:-1])
        self.skipped_steps.fill_(int(saved[0][-1]))
