"""The mean loss since the last report, and the steps that are left out of it."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor


class EndedStep(NamedTuple):
    """A step whose gradient norm has not been looked at yet."""

    step: int
    sums: Tensor  # of loss and parts, weighted, over the step's micro-batches
    weight: float
    read: Callable[[], list[float]]  # waits for the device; returns [gradient norm, *sums]


class LossMeter:
    """Collect losses on the device, because asking for a number waits for a GPU.

    A step whose gradient norm is not finite changes no weights. It counts as skipped and is left
    out of the means. A GPU's norm is read when the next step has been queued, so that the GPU
    never runs dry.

    Args:
        parts: names of further means that each micro-batch has besides its loss.
        on_skip: called with the step and the gradient norm of a step that is skipped.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        parts: tuple[str, ...],
        on_skip: Callable[[int, float], None],
    ):
        self.accelerator = accelerator
        self.names = ("loss", *parts)
        self.on_skip = on_skip
        self.skipped_steps = 0  # of the whole run
        self.bad_in_row = 0  # steps skipped since the last one that counted
        self.last_bad = 0  # the last step that was skipped
        self.last_loss: float | None = None  # this process's, of the last step that was judged
        self._sums = torch.zeros(len(self.names), device=accelerator.device)
        self._weight = 0.0
        self._step_sums = torch.zeros_like(self._sums)
        self._step_weight = 0.0
        self._ended: EndedStep | None = None

    def add(self, weight: float, **means: Tensor) -> None:
        """Add a micro-batch.

        Args:
            weight: its targets that count, as a share of a full micro-batch's.
            means: detached mean of the loss and of each part over these targets.
        """
        self._step_sums.add_(torch.stack([means[name] for name in self.names]), alpha=weight)
        self._step_weight += weight

    def end_step(self, step: int, grad_norm: float | Tensor) -> None:
        """Close the step; `judge` decides whether it counts."""
        self.judge()
        sums, weight = self._step_sums, self._step_weight
        self._step_sums, self._step_weight = torch.zeros_like(sums), 0.0
        if sums.is_cuda:
            self._ended = EndedStep(step, sums, weight, _copied(grad_norm, sums))
        else:
            self._ended = EndedStep(step, sums, weight, lambda: [float(grad_norm), *sums.tolist()])
            self.judge()

    def judge(self) -> None:
        """Count the step that has ended, or leave it out."""
        if self._ended is None:
            return
        (step, sums, weight, read), self._ended = self._ended, None
        grad_norm, loss, *_ = read()
        self.last_loss = loss / weight if weight else None
        if math.isfinite(grad_norm):
            self._sums += sums
            self._weight += weight
            self.bad_in_row = 0
            return
        self.skipped_steps += 1
        self.bad_in_row += 1
        self.last_bad = step
        self.on_skip(step, grad_norm)

    def take(self, tokens: int) -> tuple[dict[str, float | None], float]:
        """Return the means over all processes since the last call, and the sum of `tokens`.

        A mean is None where every step was skipped. Every process must call it.
        """
        here = torch.tensor([self._weight, tokens], device=self._sums.device)
        *sums, weight, tokens = self.accelerator.reduce(torch.cat([self._sums, here])).tolist()
        self._sums.zero_()
        self._weight = 0.0
        means = [total / weight if weight else None for total in sums]
        return dict(zip(self.names, means, strict=True)), tokens

    def state(self) -> dict[str, float]:
        """Return what a resumed run goes on with."""
        self.judge()
        sums = dict(zip(self.names, self._sums.tolist(), strict=True))
        return sums | {"weight": self._weight, "skipped_steps": self.skipped_steps}

    def load_state(self, states: list[dict[str, float]], processes: int, rank: int) -> None:
        """Go on with the states that the ranks of a checkpoint saved.

        Another number of processes shares their sum equally.
        """
        if len(states) == processes:
            state = states[rank]
        else:
            state = {k: sum(each[k] for each in states) / processes for k in states[0]}
        self._sums.copy_(torch.tensor([state[name] for name in self.names]))
        self._weight = state["weight"]
        self.skipped_steps = int(states[0]["skipped_steps"])


def _copied(grad_norm: float | Tensor, sums: Tensor) -> Callable[[], list[float]]:
    """Begin a copy of numbers that a GPU has yet to compute; return a function that waits for it.

    The function does not wait for work that the GPU was given after this call.
    """
    norm = torch.as_tensor(grad_norm, device=sums.device, dtype=sums.dtype)
    here = torch.hstack([norm, sums]).to("cpu", non_blocking=True)  # pinned memory
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return here.tolist()

    return read
