"""The training step of this project: a `Run` and the same calls as the training script."""

import itertools
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch import Tensor

from lm.common.errors import stop_in_order
from lm.engine.memory import estimate
from lm.training.arguments import as_arguments, build_parser
from lm.training.run import Run
from lm.training.set_up import set_up

LAST_STEP = 1_000_000  # so many steps that --compile auto decides to compile
# Report and save nothing. Only step LAST_STEP is profiled; `OurStep.profile` takes it.
QUIET = (
    f"--log_with none --warmup_steps 0 --max_steps {LAST_STEP} --save_interval 0 --save_minutes 0 "
    f"--profile --profile_interval {LAST_STEP}"
)


def start_run(flags: list[str]) -> Run:
    """Return a run that is ready for its first step; its run folder is deleted.

    Args:
        flags: flags of the training script.

    Raises UsageError or ConfigError if the flags or the data are invalid.
    """
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        typed = build_parser().parse_args(["--out_dir", folder, *QUIET.split(), *flags])
        run = set_up([as_arguments(vars(typed))])
    stop_in_order()  # replaces the handlers of the Run, which note the first signal
    run.model.train()
    return run


class OurStep:
    """Take one optimizer step of the training script per call of `step`.

    Args:
        flags: flags of the training script.
    """

    def __init__(self, flags: list[str]):
        self.run = run = start_run(flags)
        self.device, self.engine = run.accelerator.device, run.engine.name
        self.expected = estimate(run.engine.strategy, run.work)
        self._steps = itertools.count(1)
        self._loss: Tensor | None = None

    def step(self) -> None:
        """Take the next step. The call waits for the GPU only if the engine waits."""
        self._take(next(self._steps))

    def profile(self, folder: Path) -> dict[str, float]:
        """Take a step; write its trace into `folder`; return the seconds of phases and step."""
        self.run.profiler.folder = folder
        self._take(LAST_STEP)
        seconds, _ = self.run.profiler.end_step(LAST_STEP)
        return seconds

    def _take(self, number: int) -> None:
        run = self.run
        run.begin(number)
        for batch in run.micro_batches():
            with run.accumulate():
                out = run.model(batch.tokens, batch.targets)
                run.backward(out.loss, batch, out.routing)
        self._loss = out.loss.detach()
        run.update()

    def loss(self) -> float:
        """Return the loss of the last micro-batch, after waiting for the device."""
        return float(self._loss)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work. A CPU works synchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
