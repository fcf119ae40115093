"""What is measured from one report to the next: the mean loss, and time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor


class LossMeter:
    """Collect losses on the device, because asking for a number waits for a GPU.

    A step whose gradient norm is not finite changes no weights. It counts as skipped and is left
    out of the means.

    Args:
        parts: names of further means that each micro-batch has besides its loss.
    """

    def __init__(self, accelerator: Accelerator, parts: tuple[str, ...] = ()):
        self.accelerator = accelerator
        self.names = ("loss", *parts)
        device = accelerator.device
        # Weighted sums of the loss and the parts, and the sum of the weights: of the step under
        # way, and of the steps since the last report.
        self._step = torch.zeros(len(self.names) + 1, device=device)
        self._sums = torch.zeros_like(self._step)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)  # of the whole run
        self._bad_in_row = torch.zeros_like(self._skipped)

    def add(self, weight: float, **means: Tensor) -> None:
        """Add a micro-batch.

        Args:
            weight: its targets that count, as a share of a full micro-batch's.
            means: detached mean of the loss and of each part over these targets.
        """
        self._step[:-1].add_(torch.stack([means[name] for name in self.names]), alpha=weight)
        self._step[-1] += weight

    def end_step(self, grad_norm: float | Tensor) -> None:
        """Count the step, or skip it where its gradient norm is not finite."""
        good = torch.as_tensor(grad_norm, device=self._step.device).isfinite()
        self._sums += self._step.where(good, 0.0)
        self._bad_in_row = (self._bad_in_row + 1).where(~good, 0)
        self._skipped += ~good
        self._step.zero_()

    def bad_in_row(self) -> int:
        """Return the number of steps skipped since the last one that counted; wait for a GPU."""
        return int(self._bad_in_row)

    def skipped_steps(self) -> int:
        """Return the number of steps skipped in the whole run; wait for a GPU."""
        return int(self._skipped)

    def take(self, tokens: int) -> tuple[dict[str, float | None], float]:
        """Return the means over all processes since the last call, and the sum of `tokens`.

        A mean is None where every step was skipped. Every process must call it.
        """
        tokens_here = torch.tensor([tokens], device=self._sums.device)
        sums = self.accelerator.reduce(torch.cat([self._sums, tokens_here]))
        *totals, weight, tokens = sums.tolist()
        self._sums.zero_()
        means = [total / weight if weight else None for total in totals]
        return dict(zip(self.names, means, strict=True)), tokens

    def state(self) -> dict[str, float]:
        """Return what a resumed run goes on with."""
        sums = dict(zip((*self.names, "weight"), self._sums.tolist(), strict=True))
        return sums | {"skipped_steps": self.skipped_steps()}

    def load_state(self, states: list[dict[str, float]], rank: int) -> None:
        """Go on with the states that the ranks of a checkpoint saved.

        Another number of processes shares their sum equally.
        """
        names, processes = (*self.names, "weight"), self.accelerator.num_processes
        if len(states) == processes:
            sums = [states[rank][name] for name in names]
        else:
            sums = [sum(each[name] for each in states) / processes for name in names]
        self._sums.copy_(torch.tensor(sums))
        self._skipped.fill_(int(states[0]["skipped_steps"]))


class StepClock:
    """Time since its making; a new one is made at each report."""

    def __init__(self):
        self.steps = 0
        self.tokens = 0  # of this process, without padding
        self.paused = 0.0  # seconds
        self.began = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds, with pauses."""
        return time.perf_counter() - self.began

    @property
    def seconds(self) -> float:
        """Seconds of training, without pauses."""
        return self.elapsed - self.paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time in here out of `seconds`."""
        start = time.perf_counter()
        yield
        self.paused += time.perf_counter() - start
