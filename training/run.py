"""A training under way: the verbs of which the pages train_*.py are made."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from common.errors import UsageError
from data.dataset import TokenStream, micro_batches
from data.order import LengthSampler, MicroBatchSampler
from model import IGNORE_INDEX
from training.arguments import TrainingArguments
from training.build import BuiltModel
from training.checkpointing import Checkpointer, load_checkpoint
from training.engine.launch import Engine
from training.interruption import StopRequest, end_stopped
from training.log import TrainingLog
from training.optimizer import LearningRate, set_learning_rate
from training.prepare import Prepared
from training.profiler import StepProfiler
from training.results import leave_results, say_stopped, write_sample
from training.teacher import Teacher
from training.validation import validate, validation_loader


class MicroBatch(NamedTuple):
    """Sequences that one process feeds forward at once."""

    tokens: Tensor  # (batch_size, length), on the device, like the targets
    targets: Tensor  # (batch_size, length); IGNORE_INDEX where one does not count
    n_targets: int  # targets that count
    weight: float = 1.0  # n_targets over the mean n_targets of the step's micro-batches


def step_batches(
    train_set: TokenStream, args: TrainingArguments, engine: Engine, start_step: int
) -> Iterator[Iterator[MicroBatch]]:
    """Yield the micro-batches of each step behind start_step. Every process must iterate. Every
    target of a global batch weighs the same in the gradient, whichever micro-batch holds it."""
    global_batch, device = args.global_batch(engine.processes), engine.accelerator.device
    sampler = MicroBatchSampler
    if train_set.lengths is not None:
        sampler = partial(LengthSampler, lengths=train_set.lengths, global_batch=global_batch)
    order = sampler(
        len(train_set),
        args.batch_size,
        rank=engine.accelerator.process_index,
        world_size=engine.processes,
        seed=args.seed,
        start=start_step * global_batch,
    )
    source = micro_batches(train_set, order, args.num_workers, pin_memory=device.type == "cuda")

    def read() -> MicroBatch:
        tokens, targets = next(source)
        n_targets = targets.numel()
        if not train_set.every_target_counts:
            n_targets = int((targets != IGNORE_INDEX).sum())
        tokens, targets = (x.to(device, non_blocking=True) for x in (tokens, targets))
        return MicroBatch(tokens, targets, n_targets)

    while True:
        batches = (read() for _ in range(args.accumulation_steps))
        if not train_set.every_target_counts:
            batches = list(batches)  # their weights need the targets on all processes
            count = engine.total(sum(batch.n_targets for batch in batches))
            mean = max(1, count) / (args.accumulation_steps * engine.processes)
            batches = [batch._replace(weight=batch.n_targets / mean) for batch in batches]
        yield batches


@dataclass(eq=False)
class Run:
    """All that training needs, and the verbs of the training pages."""

    prepared: Prepared  # what is trained on which data; a checkpoint that it names is loaded
    engine: Engine
    built: BuiltModel  # the model with its initial weights, and the optimizer
    stop: StopRequest
    teacher: Teacher | None = None  # whose logits the loss compares
    name: str = ""  # begins every log line, where several runs are trained side by side

    def __post_init__(self):
        prepared, engine, built = self.prepared, self.engine, self.built
        start, train_set, val_set = prepared.start, prepared.train_set, prepared.val_set
        args = self.args = prepared.args
        self.accelerator, self.folder = engine.accelerator, start.folder
        self.first_step, self.total_steps = start.step + 1, prepared.total_steps
        self.model, self.optimizer = built.model, built.optimizer
        self.stopped: tuple[int, str] | None = None  # the last step and the reason
        self.learning_rate = LearningRate(args, self.total_steps)
        self.samples_per_step = args.global_batch(engine.processes)
        self._batches = step_batches(train_set, args, engine, start.step)
        self.log = TrainingLog(
            accelerator=self.accelerator,
            folder=self.folder,
            args=args,
            tokens_per_step=self.samples_per_step * train_set.tokens_per_sample,
            flops_per_token=prepared.flops_per_token,
            total_steps=self.total_steps,
            first_step=self.first_step,
            name=self.name,
        )
        if start.checkpoint:
            load_checkpoint(start.checkpoint, engine, built.state, self.log.meter)
        self.profiler = StepProfiler(self.accelerator, self.model, self.folder.profile, args)
        self.val_loader = val_set and validation_loader(
            val_set, args.batch_size, args.eval_samples, self.accelerator
        )
        self.checkpointer = Checkpointer(prepared, engine, built, self.log)

    def steps(self) -> Iterator[int]:
        """Yield the optimizer steps to take, counted from 1, until the run is told to stop."""
        self.model.train()
        for step in range(self.first_step, self.total_steps + 1):
            yield step
            if self.stopped:
                return

    def begin(self, step: int) -> None:
        """Set the learning rate, now, because DeepSpeed steps inside `backward`; profile if due."""
        set_learning_rate(self.optimizer, self.learning_rate(step))
        self.profiler.begin_step(step)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the step."""
        self.profiler.phase("data")
        for batch in next(self._batches):
            yield batch
            self.profiler.phase("data")

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Exchange gradients as seldom as possible; forward and `backward` belong in here."""
        self.profiler.phase("forward")
        with self.accelerator.accumulate(self.model):
            yield

    def backward(self, loss: Tensor, batch: MicroBatch, **parts: Tensor) -> None:
        """Add the gradient of a micro-batch's loss, the mean over its targets that count, and note
        it for the log; `parts` are detached means over the same targets."""
        self.profiler.phase("backward")
        # The mean over no target is not a number; its gradient counts as zero.
        weighted = loss * batch.weight if batch.n_targets else loss.nan_to_num() * 0
        self.accelerator.backward(weighted)
        if batch.n_targets:
            share = batch.n_targets / (self.args.batch_size * self.prepared.train_set.seq_len)
            self.log.meter.add(share, loss=loss.detach(), **parts)

    def clip_gradients(self) -> float | Tensor:
        """Scale the gradient to a norm of --grad_clip at most; return the norm before, on a GPU as
        a tensor that has yet to be computed. A step whose norm is not finite is left out."""
        self.profiler.phase("optimizer")
        max_norm = self.args.grad_clip or math.inf
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        # DeepSpeed and the loss scaling of fp16 look themselves; others are told as by a GradScaler
        if self.engine.deepspeed is None and self.accelerator.scaler is None:
            self.optimizer.optimizer.found_inf = (~norm.isfinite()).float()
        return norm if getattr(norm, "is_cuda", False) else float(norm)

    def end(self, step: int, grad_norm: float | Tensor) -> None:
        """Do as `report` does, and save where it is time or the run was told to stop."""
        val_loss = self.report(step, grad_norm)
        reason = self.stop.reason()
        if reason or self.stop.time_to_save or self.is_time_to_save(step, val_loss):
            self.save(step, val_loss)
            self.stop.saved()
        if reason and step < self.total_steps:
            self.stopped = step, reason

    def report(self, step: int, grad_norm: float | Tensor) -> float | None:
        """Log the step; validate and write a sample where it is time. Return the validation loss,
        None without one. Raises UsageError: --max_bad_steps steps had a non-finite gradient."""
        with self.log.clock.pause():
            profile = self.profiler.end_step(step)
        epoch = step * self.samples_per_step / len(self.prepared.train_set)
        self.log.step(step, self.learning_rate(step), grad_norm, epoch)
        if profile:
            self.log.profile(step, *profile)
        most, bad = self.args.max_bad_steps, self.log.meter.bad_in_row
        if self._is_time(step, most) and bad >= most:  # seldom: it waits for a GPU
            self.checkpointer.wait()
            raise UsageError(
                f"{int(bad)} steps in a row had a non-finite gradient and changed nothing, the "
                f"last one was step {step}: try a lower --learning_rate"
            )
        val_loss = self.validate(step) if self._is_time(step, self.args.eval_interval) else None
        if self.args.sample_interval and step % self.args.sample_interval == 0:
            self.write_sample(step)
        return val_loss

    def validate(self, step: int) -> float | None:
        """Log the validation loss and return it; None without a split, or if it is not finite."""
        if not self.val_loader:
            return None
        with self.log.clock.pause():
            bytes_per_token = self.prepared.val_set.bytes_per_token
            result = validate(self.model, self.val_loader, self.accelerator, bytes_per_token)
        self.log.validation(step, result)
        return result["loss"] if math.isfinite(result["loss"]) else None

    def write_sample(self, step: int) -> None:
        """Write what the model generates after this step."""
        with self.log.clock.pause():
            write_sample(step, self.built.state.whole_model(), self.prepared, self.log)

    def is_time_to_save(self, step: int, val_loss: float | None) -> bool:
        """Return whether a checkpoint is due, by the best validation or by --save_interval."""
        is_best = val_loss is not None and val_loss < self.checkpointer.lowest
        return is_best or self._is_time(step, self.args.save_interval)

    def _is_time(self, step: int, interval: int) -> bool:
        return step == self.total_steps or (interval > 0 and step % interval == 0)

    def save(self, step: int, val_loss: float | None) -> None:
        """Begin a checkpoint; a thread writes it behind training."""
        with self.log.clock.pause():
            self.checkpointer.save(step, val_loss)

    def close(self) -> bool:
        """Wait for the last checkpoint and close the log; return whether it was saved."""
        saved = self.checkpointer.wait()
        self.log.close()
        return saved

    def finish(self) -> None:
        """Leave the results; where the run was told to stop, say how to go on instead."""
        if self.stopped:
            saved = self.close()
            if self.engine.is_main:
                say_stopped(self.folder, *self.stopped, saved)
            end_stopped([self.engine], saved)
        else:
            self.leave_results()
            self.accelerator.end_training()

    def leave_results(self) -> None:
        """Write weights, sample and report. Raises UsageError: the last checkpoint is not saved."""
        weights = self.built.state.weights()
        saved = self.close()
        if self.engine.is_main:
            leave_results(self.prepared, weights, self.log)
        if not saved:
            raise UsageError(f"{self.folder.path}: its last checkpoint has not been saved")
