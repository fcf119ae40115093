"""The training step of this project: a `Run` and the same calls as the training script."""

import itertools
import math
import sys
import tempfile
from contextlib import redirect_stdout

import torch
from torch import Tensor

from common.errors import stop_in_order
from training.arguments import parse_arguments
from training.run import Run
from training.start import set_up

# Report and save nothing. With this many steps, --compile auto decides to compile.
QUIET = "--log_with none --warmup_steps 0 --max_steps 1000000 --save_interval 0 --save_minutes 0"


def start_run(flags: list[str]) -> Run:
    """Return a run that is ready for its first step and leaves nothing on the disk.

    Args:
        flags: of the training script.

    Raises UsageError, ConfigError or DataError if the flags or the data are invalid.
    """
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        run = set_up(*parse_arguments(["--out_dir", folder, *QUIET.split(), *flags]))
    stop_in_order()  # replaces the handlers of the Run, which only note a signal
    run.model.train()
    return run


class OurStep:
    """Take one optimizer step of the training script per call of `step`.

    Args:
        flags: of the training script.
    """

    def __init__(self, flags: list[str]):
        self.run = start_run(flags)
        self.device, self.engine = self.run.accelerator.device, self.run.engine.name
        self._steps = itertools.count(1)
        self._loss: Tensor | None = None
        self._norm: float | Tensor = math.nan

    def step(self) -> None:
        run = self.run
        run.begin(next(self._steps))
        for batch in run.micro_batches():
            with run.accumulate():
                out = run.model(batch.tokens, batch.targets)
                run.backward(out.loss, batch, out.routing)
        self._loss = out.loss.detach()
        self._norm = run.clip_gradients()
        run.optimizer.step()
        run.optimizer.zero_grad()

    def loss(self) -> float:
        """Return the loss of the last micro-batch, after waiting for the device.

        Raises FloatingPointError if the last gradient was not finite, so that the step was skipped.
        """
        if not math.isfinite(self._norm):
            raise FloatingPointError(f"the gradient's norm is {float(self._norm)}")
        return float(self._loss)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work. A CPU works synchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
