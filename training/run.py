"""A training run: what the loop works on, and its verbs."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader

from common.errors import UsageError
from data.dataset import PackedDataset
from data.order import MicroBatchSampler
from model import IGNORE_INDEX, LMConfig
from runs.folder import RunFolder
from training.arguments import TrainingArguments
from training.checkpointing import Checkpointer
from training.engine.launch import Engine
from training.engine.state import TrainingState
from training.finish import finish, say_stopped
from training.interruption import StopRequest
from training.log import TrainingLog
from training.optimizer import set_learning_rate
from training.profiler import StepProfiler
from training.samples import SampleWriter
from training.schedule import LearningRate
from training.validation import validate


@dataclass
class Run:
    """One step is `begin`, then for each of the `micro_batches` a forward pass and `backward`, then
    `update`; `end` is what comes between two steps. The training programs spell it out.

    `end` and `finish` need the second half of the fields, the verbs of a step do without.
    """

    args: TrainingArguments
    engine: Engine
    model: torch.nn.Module  # as prepared, like the optimizer
    optimizer: torch.optim.Optimizer
    train_set: PackedDataset
    sampler: MicroBatchSampler  # of this process, from first_step on
    batches: Iterator[tuple[Tensor, Tensor]]  # what it samples, on the CPU
    learning_rate: LearningRate
    log: TrainingLog
    profiler: StepProfiler
    first_step: int = 1

    config: LMConfig | None = None
    folder: RunFolder | None = None
    state: TrainingState | None = None
    val_loader: DataLoader | None = None  # None: no validation
    bytes_per_token: float = 0.0  # of the validation text
    samples: SampleWriter | None = None
    checkpointer: Checkpointer | None = None
    stop: StopRequest | None = None

    @property
    def samples_per_step(self) -> int:
        """The global batch, in sequences."""
        return self.args.batch_size * self.args.accumulation_steps * self.engine.processes

    def steps(self) -> Iterator[int]:
        """The optimizer steps to take, counted from 1."""
        self.model.train()
        yield from range(self.first_step, self.learning_rate.total_steps + 1)

    def begin(self, step: int) -> None:
        """Set the learning rate: now, for DeepSpeed steps inside `backward`."""
        self.rate = self.learning_rate(step)
        set_learning_rate(self.optimizer, self.rate)
        self.profiler.begin_step(step)

    def micro_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(tokens, targets) of one step, on the device, each (batch_size, max_seq_len)."""
        device = self.engine.accelerator.device
        self.profiler.phase("data")
        step = islice(self.batches, self.args.accumulation_steps)
        for tokens, targets in step if self.train_set.all_targets_count else self._weigh(step):
            tokens = tokens.to(device, non_blocking=True)
            yield tokens, targets.to(device, non_blocking=True)
            self.profiler.phase("data")

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around the forward pass and `backward` of a micro-batch: gradients are averaged over the
        step's micro-batches, and exchanged between processes as seldom as the engine can."""
        self.profiler.phase("forward")
        with self.engine.accelerator.accumulate(self.model):
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss, which is the mean over its targets that count.

        Every target of the global batch weighs the same, whichever micro-batch it is in.
        """
        self.profiler.phase("backward")
        if self.train_set.all_targets_count:
            self.engine.accelerator.backward(loss)
            self.log.micro_batch(loss.detach())
            return
        loss = loss if self._count else loss.nan_to_num()  # the mean of nothing is not a number
        self.engine.accelerator.backward(loss * (self._count / self._mean_count))
        full = self.args.batch_size * self.train_set.seq_len
        self.log.micro_batch(loss.detach(), weight=self._count / full)

    def _weigh(self, step: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The same micro-batches, with `_count`, how many targets of each do count, and
        `_mean_count` of the whole step on all processes."""
        batches = list(step)
        counts = [int((targets != IGNORE_INDEX).sum()) for _, targets in batches]
        total = self.engine.over_all(sum(counts), ReduceOp.SUM)
        self._mean_count = max(1, total) / (len(batches) * self.engine.processes)
        for batch, self._count in zip(batches, counts, strict=True):
            yield batch

    def update(self) -> None:
        """Clip the gradient, step, and begin a new gradient.

        Where its norm is not finite, the step is left out: DeepSpeed and fp16's loss scaling see to
        it themselves.
        """
        self.profiler.phase("optimizer")
        accelerator, max_norm = self.engine.accelerator, self.args.grad_clip or math.inf
        self.grad_norm = float(accelerator.clip_grad_norm_(self.model.parameters(), max_norm))
        if math.isfinite(self.grad_norm) or accelerator.scaler is not None:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self, step: int) -> bool:
        """Log the step; validate, write a sample and save where it is time. True: the run was told
        to stop, and has said its last words."""
        log = self.log
        with log.pause():  # not training: throughput leaves it out
            profile = self.profiler.end_step(step)
        epoch = step * self.samples_per_step / len(self.train_set)
        log.step(step, self.rate, self.grad_norm, epoch)
        if profile:
            log.profile(step, *profile)
        if log.bad_in_row >= self.args.max_bad_steps:
            self._give_up(step)
        val_loss = None
        if self.val_loader and self._is_time(step, self.args.eval_interval):
            with log.pause():
                accelerator = self.engine.accelerator
                result = validate(self.model, self.val_loader, accelerator, self.bytes_per_token)
            log.validation(step, result)
            val_loss = result["loss"]
        with log.pause():
            self.samples.write(step)
        reason = self.stop.reason()
        if reason or self._is_time(step, self.args.save_interval):
            with log.pause():
                self.checkpointer.save(step, val_loss)
        self.checkpointer.poll()
        if reason is None or step == self.learning_rate.total_steps:
            return False
        saved = self.checkpointer.wait()
        log.close()
        if self.engine.is_main:
            say_stopped(self.folder, step, reason, saved)
        self.engine.accelerator.end_training()
        if not saved:
            sys.exit(1)
        return True

    def _is_time(self, step: int, interval: int) -> bool:
        """Every `interval` steps, never if it is 0, and at the last step in any case."""
        is_last = step == self.learning_rate.total_steps
        return is_last or (interval > 0 and step % interval == 0)

    def _give_up(self, step: int) -> None:
        """Raises UsageError: nothing but gradients that are not finite; names the step's samples,
        and leaves the whole list."""
        self.checkpointer.wait()
        first, last = (step - 1) * self.samples_per_step, step * self.samples_per_step
        samples = self.sampler.indices(np.arange(first, last)).tolist()
        if self.engine.is_main:
            row = json.dumps({"step": step, "samples": samples})
            self.folder.bad_samples.write_text(row + "\n", encoding="utf-8")
        shown = ", ".join(map(str, samples[:16])) + (", ..." if len(samples) > 16 else "")
        raise UsageError(
            f"{self.log.bad_in_row} steps in a row had a non-finite gradient and changed nothing; "
            f"the batch of step {step} was samples {shown} (all in the run's bad_samples.json); "
            "the last checkpoint is as it was: try a lower --learning_rate"
        )

    def finish(self) -> None:
        """Leave the weights, a sample and the report of a run that has come to its end.

        Raises:
            UsageError: they are there, but the last checkpoint is not.
        """
        saved = self.checkpointer.wait()
        weights = self.state.weights()
        self.log.close()
        if self.engine.is_main:
            finish(self.args, self.folder, self.config, weights, self.samples.prompt_from)
            if not saved:
                raise UsageError(
                    f"{self.folder.path}: the weights are there, the last checkpoint is not"
                )
        self.engine.accelerator.end_training()
