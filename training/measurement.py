"""Measure the time of a training step: take a few real steps, and leave nothing behind."""

import gc
import importlib
import io
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import count, pairwise
from statistics import median
from typing import NamedTuple

import torch

from training.arguments import TrainingArguments, as_arguments
from training.failures import one_line_failures
from training.interruption import SIGNALS
from training.run import Run
from training.set_up import notebook_process, set_up

MEASURED_SECONDS = 1.5  # minimum time to measure; at least two steps
# The steps end by time, long before max_steps.
QUIET = {"log_with": "none", "max_steps": 10**9, "save_interval": 0, "save_minutes": 0.0}
QUIET |= {"profile": False, "warmup_steps": None, "accumulation_steps": 1}


class StepTime(NamedTuple):
    typical: float  # seconds of a step, the median
    first: float  # seconds of the first step, which compiles and allocates memory


class TimedRun(Run):
    """A run of a few steps that takes their time. It logs, validates, samples and saves nothing."""

    def __init__(self, *parts, **names):
        super().__init__(*parts, **names)
        self.clock: list[float] = []  # time.perf_counter() before the first and after each step

    def steps(self) -> Iterator[int]:
        """Yield steps until MEASURED_SECONDS have passed since the first one."""
        self.model.train()
        self.clock.append(time.perf_counter())
        for step in count(1):
            yield step
            if self.accelerator.device.type == "cuda":
                torch.cuda.synchronize()
            self.clock.append(time.perf_counter())
            if step > 2 and self.clock[-1] - self.clock[1] > MEASURED_SECONDS:
                return

    def end(self, step: int, grad_norm) -> None:
        pass

    def validate(self, step: int) -> None:
        pass

    def write_sample(self, step: int) -> None:
        pass

    def finish(self) -> None:
        self.log.close()


def measure_steps(kind: type[TrainingArguments], flags: dict, threads: int | None) -> StepTime:
    """Run a training program in this process alone and return the times of its steps. The run
    folder is deleted. `threads`: CPU threads; None: `set_up` decides.

    Raises UsageError or ConfigError if the flags cannot work, TooLittleMemoryError if memory ran
    out."""
    # Delete the previous run, which has reference cycles, and may have run out of memory. Deleting
    # DeepSpeed's engine leaves more to delete.
    gc.collect()
    gc.collect()
    with (
        notebook_process([kind.program]),
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
    ):
        os.environ["WORLD_SIZE"] = "1"
        args, settings = as_arguments(flags | QUIET | {"out_dir": folder}, kind)
        with one_line_failures(args, settings):
            run = set_up(args, settings, TimedRun)
            for number in SIGNALS:  # a signal ends the measurement at once
                signal.signal(number, signal.SIG_DFL)
            if threads:
                torch.set_num_threads(threads)
            try:
                importlib.import_module(kind.program.removesuffix(".py")).train(run)
            finally:
                if run.engine.deepspeed is not None:
                    # Else DeepSpeed's hooks keep the weights. Under ZeRO-3 a cache of it does, too.
                    run.model.destroy()
                    importlib.import_module("deepspeed.comm").destroy_process_group()
            first, *others = (after - before for before, after in pairwise(run.clock))
    return StepTime(median(others), first)
