"""Measure the time of a training step: take a few real steps, and leave nothing behind."""

import gc
import importlib
import io
import os
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import redirect_stdout
from functools import partial
from itertools import count
from typing import NamedTuple

import torch

from lm.common.errors import handle
from lm.training.arguments import TrainingArguments, as_arguments
from lm.training.failures import one_line_failures
from lm.training.interruption import SIGNALS
from lm.training.run import MicroBatch, Run
from lm.training.set_up import notebook_process, set_up
from lm.training.validation import validate

# Seconds of a window, and windows of each number of threads. The shortest window counts, because
# other programs may disturb one of them.
WINDOW, WINDOWS = 0.35, 2
# A measurement takes about ten steps. If these would take too long, its steps have fewer sequences.
STEPS = 10
# The steps end by time, long before max_steps.
QUIET = {"log_with": "none", "max_steps": 10**9, "save_interval": 0, "save_minutes": 0.0}
QUIET |= {"profile": False, "warmup_steps": None, "accumulation_steps": 1}


class Speed(NamedTuple):
    """The seconds that one process needs for a model."""

    step: float  # of a step with one micro-batch
    one: float  # of a step with a single sequence
    sample: float  # of one sequence in a validation; 0 without validation data
    threads: int | None = None  # the fastest number of CPU threads; None: there was no choice
    measured: bool = True  # False: assumed

    def with_rows(self, rows: int, measured_rows: int) -> "Speed":
        """Return the speed of micro-batches of `rows` sequences, where `step` is the time of
        `measured_rows`: each sequence takes equally long, besides a time that every step takes."""
        each = self.step
        if measured_rows > 1:
            each = max(0.0, self.step - self.one) / (measured_rows - 1)
        return self._replace(step=self.step + each * (rows - measured_rows))


class TimedRun(Run):
    """A run of a few steps that takes their time with each of several numbers of `threads`, in
    about `seconds` at most. It logs and saves nothing."""

    def __init__(self, *parts, threads: tuple[int, ...], seconds: float, **names):
        super().__init__(*parts, **names)
        self.threads, self.until = threads, time.perf_counter() + seconds
        self.seconds = seconds
        self.rows = self.args.batch_size  # sequences of a micro-batch
        self.speed: Speed | None = None  # the result, when all times are taken
        self.first_step = 0  # at step 1 fine-tuning would begin with a validation

    def steps(self) -> Iterator[int]:
        """Yield steps until all times are taken."""
        self.model.train()
        times: dict[int | None, float] = {}  # number of threads → seconds of a step
        if self.why_not_compiled:  # other numbers of sequences would be compiled anew
            self.rows = 1
            yield from self._window()  # allocates memory
            taken = yield from self._window()
            share = min(1.0, self.seconds / STEPS / taken)
            self.rows = max(1, int(share * self.args.batch_size))
        yield from self._window()
        for _ in range(WINDOWS):
            for number in self.threads or (None,):
                if times.get(number) and time.perf_counter() > self.until:
                    continue
                if number:
                    torch.set_num_threads(number)
                taken = yield from self._window(WINDOW)
                times[number] = min(taken, times.get(number, taken))
        best = min(times, key=times.get)
        if best:
            torch.set_num_threads(best)
        sample = self._validation_seconds() if self.val_loader else 0.0
        one = times[best] / self.args.batch_size
        if self.why_not_compiled:
            self.rows = 1
            taken = yield from self._window(WINDOW)
            one = taken / self.args.batch_size
        self.speed = Speed(times[best], one, sample, best)

    def _window(self, seconds: float = 0.0) -> Generator[int, None, float]:
        """Yield steps for `seconds`, at least one; return the seconds of a full micro-batch."""
        begun = time.perf_counter()
        for n in count(1):
            yield n
            if self.accelerator.device.type == "cuda":
                torch.cuda.synchronize()
            if (taken := time.perf_counter() - begun) >= seconds:
                return taken / n * self.args.batch_size / self.rows

    def _validation_seconds(self) -> float:
        """Return the seconds of a sequence of mean length in a validation."""
        times, (tokens, targets) = [], next(iter(self.val_loader))  # the shortest conversations
        batch = tokens[: self.rows], targets[: self.rows]
        while len(times) < WINDOWS and (not times or time.perf_counter() < self.until):
            begun = time.perf_counter()
            validate(self.model, [batch], self.accelerator, 1.0)
            times.append(time.perf_counter() - begun)
        scale = self.inputs.val_set.tokens_per_sample / tokens.shape[1]
        return min(times) / len(batch[0]) * scale

    def micro_batches(self) -> Iterator[MicroBatch]:
        for batch in super().micro_batches():
            fields = {k: v for k, v in batch._asdict().items() if isinstance(v, torch.Tensor)}
            yield batch._replace(**{k: v[: self.rows] for k, v in fields.items()})

    def end(self, step: int, grad_norm) -> None:
        pass

    def finish(self) -> None:
        self.log.close()


def measure(
    train: Callable[[Run], None],
    arguments: type[TrainingArguments],
    flags: dict,
    threads: tuple[int, ...],
    seconds: float,
) -> Speed:
    """Run the loop of a training program in this process alone and return the times of its steps,
    with the best of these numbers of CPU `threads`; (): `set_up` decides. If steps would take
    longer than about `seconds`, the times of steps of fewer sequences are scaled up. Raises
    UsageError or ConfigError if the flags cannot work, TooLittleMemoryError if memory ran out."""
    # Delete the previous run, which has reference cycles, and may have run out of memory. Deleting
    # DeepSpeed's engine leaves more to delete.
    gc.collect()
    gc.collect()
    with (
        notebook_process([arguments.program]),
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
    ):
        os.environ["WORLD_SIZE"] = "1"
        args, settings = as_arguments(flags | QUIET | {"out_dir": folder}, arguments)
        with one_line_failures(args, settings):
            run = set_up([(args, settings)], partial(TimedRun, threads=threads, seconds=seconds))
            handle(SIGNALS, signal.SIG_DFL)  # a signal ends the measurement at once
            try:
                train(run)
            finally:
                if run.engine.deepspeed is not None:
                    # Else DeepSpeed's hooks keep the weights. Under ZeRO-3 a cache of it does, too.
                    run.model.destroy()
                    importlib.import_module("deepspeed.comm").destroy_process_group()
    return run.speed
