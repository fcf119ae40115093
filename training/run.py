"""A training run: what the loop works on, and its verbs."""

import json
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
from torch import Tensor

from common.errors import UsageError
from data.dataset import PackedDataset
from data.loader import micro_batches
from data.order import LengthSampler, MicroBatchSampler
from model import IGNORE_INDEX
from training.arguments import TrainingArguments
from training.checkpointing import Checkpointer, load_checkpoint
from training.engine.launch import Engine
from training.finish import finish, say_stopped
from training.interruption import StopRequest, end_stopped
from training.log import TrainingLog
from training.optimizer import set_learning_rate
from training.profiler import StepProfiler
from training.resume import StartingPoint, run_identity
from training.samples import SampleWriter
from training.schedule import LearningRate
from training.setup import BuiltModel
from training.teacher import Teacher
from training.validation import validate, validation_loader


class MicroBatch(NamedTuple):
    tokens: Tensor  # (batch_size, max_seq_len), on the device as the targets are
    targets: Tensor
    n_targets: int  # those that count in the loss
    n_tokens: int | None  # without padding, where there may be some


class Run:
    """One step is `begin`, then for each of the `micro_batches` a forward pass and `backward`, then
    `update`; `end` is what comes between two steps. The training programs spell it out.

    Args:
        start: where it writes, and the checkpoint that it loads and goes on from, if any.
        built: the model, with the weights to begin with.
        val_set: None for no validation.
        total_steps: of the whole run, those before `start` included.
        started: when the program was, by `time.monotonic`; --time_limit counts from there.
        teacher: whose logits the loss is made of too, if there is one.
    """

    def __init__(
        self,
        args: TrainingArguments,
        engine: Engine,
        start: StartingPoint,
        built: BuiltModel,
        *,
        train_set: PackedDataset,
        val_set: PackedDataset | None,
        total_steps: int,
        started: float,
        teacher: Teacher | None = None,
    ):
        self.args = args
        self.engine = engine
        self.accelerator = accelerator = engine.accelerator
        self.folder = start.folder
        self.start = start
        self.first_step = start.step + 1
        self.built = built
        self.model = built.model
        self.optimizer = built.optimizer
        self.teacher = teacher
        self.learning_rate = LearningRate.from_arguments(args, total_steps)
        self.train_set = train_set
        self.samples_per_step = args.batch_size * args.accumulation_steps * engine.processes
        order = MicroBatchSampler
        if train_set.lengths is not None:
            batch = {"global_batch": self.samples_per_step}
            order = partial(LengthSampler, lengths=train_set.lengths, **batch)
        self.sampler = order(
            len(train_set),
            args.batch_size,
            rank=accelerator.process_index,
            world_size=engine.processes,
            seed=args.seed,
            start=start.step * self.samples_per_step,
        )
        on_gpu = accelerator.device.type == "cuda"
        self.batches = micro_batches(train_set, self.sampler, args.num_workers, pin_memory=on_gpu)
        self._ahead: deque[MicroBatch] = deque()  # read, and not yet trained on
        self.log = TrainingLog(
            accelerator,
            self.folder.metrics,
            log_interval=args.log_interval,
            tokens_per_step=self.samples_per_step * train_set.tokens_per_sample,
            flops_per_token=built.flops_per_token(train_set.tokens_per_sample)
            + (teacher.found.flops_per_token(train_set.tokens_per_sample) if teacher else 0),
            total_steps=total_steps,
            first_step=self.first_step,
            parts=args.logged,
        )
        if start.checkpoint:
            load_checkpoint(start.checkpoint, engine, built.state, self.log)
        self.profiler = StepProfiler(accelerator, self.model, self.folder.profile, args)
        self.val_set = val_set
        self.val_loader = val_set and validation_loader(
            val_set, args.batch_size, args.eval_samples, accelerator
        )
        prompt_from = val_set or train_set
        whole = built.state.whole_model
        self.samples = SampleWriter(args, self.folder.samples, whole, prompt_from, self.log)
        self.checkpointer = Checkpointer(
            run=self.folder,
            engine=engine,
            state=built.state,
            keep_last=args.keep_last,
            config=built.config,
            identity=run_identity(train_set, args, engine.processes, teacher and teacher.sha256),
            compiled=built.compilation.on,
            log=self.log,
            start_step=start.step,
        )
        self.started = started

    def steps(self) -> Iterator[int]:
        """The optimizer steps to take, counted from 1. From now on a signal asks the run to
        stop."""
        args = self.args
        limits = args.time_limit, args.save_minutes
        self.stop = StopRequest(self.engine, *limits, since=self.started)
        self.model.train()
        yield from range(self.first_step, self.learning_rate.total_steps + 1)

    def begin(self, step: int) -> None:
        """Set the learning rate, now, for DeepSpeed steps inside `backward`; profile where due."""
        self.rate = self.learning_rate(step)
        set_learning_rate(self.optimizer, self.rate)
        self.profiler.begin_step(step)

    def micro_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(tokens, targets) of one step, on the device, each (batch_size, max_seq_len).

        They were read ahead, by one, or by a whole step where each weighs by its share of the
        step's targets: for each of these, `backward` reads another one.
        """
        steps = self.args.accumulation_steps
        self.profiler.phase("data")
        if not self._ahead:
            self._read(1 if self.train_set.every_target_counts else steps)
        if not self.train_set.every_target_counts:
            count = self.engine.total(sum(batch.n_targets for batch in self._ahead))
            self._mean_count = max(1, count) / (steps * self.engine.processes)
        for _ in range(steps):
            tokens, targets, self._count, self._tokens = self._ahead.popleft()
            yield tokens, targets

    def _read(self, number: int) -> None:
        """So many micro-batches more, which begin their way to the device."""
        device = self.accelerator.device
        for tokens, targets in islice(self.batches, number):
            counts, n_tokens = targets != IGNORE_INDEX, None
            if self.train_set.lengths is not None:  # a sample ends with a target that counts
                n_tokens = int(counts.flip(1).cummax(1).values.sum())
            tokens, targets = (x.to(device, non_blocking=True) for x in (tokens, targets))
            self._ahead.append(MicroBatch(tokens, targets, int(counts.sum()), n_tokens))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around the forward pass and `backward` of a micro-batch: gradients are averaged over the
        step's micro-batches, and exchanged between processes as seldom as the engine can."""
        self.profiler.phase("forward")
        with self.accelerator.accumulate(self.model):
            yield

    def backward(self, loss: Tensor, **parts: Tensor) -> None:
        """Add the gradient of a micro-batch's loss, which is the mean over its targets that count.

        Every target of the global batch weighs the same, whichever micro-batch it is in.

        Args:
            parts: means over the same targets for the log, detached, by the names in `args.logged`.
        """
        self.profiler.phase("data")
        self._read(1)  # while a GPU is at the forward pass; DeepSpeed's step below waits for it
        self.profiler.phase("backward")
        if self.train_set.every_target_counts:
            self.accelerator.backward(loss)
            self.log.micro_batch(loss.detach(), **parts)
            return
        loss = loss if self._count else loss.nan_to_num()  # the mean of nothing is not a number
        self.accelerator.backward(loss * (self._count / self._mean_count))
        full = self.args.batch_size * self.train_set.seq_len
        weight = self._count / full
        self.log.micro_batch(loss.detach(), weight=weight, tokens=self._tokens, **parts)

    def update(self) -> None:
        """Clip the gradient, step, and begin a new gradient.

        Where its norm is not finite, the step is left out: DeepSpeed and fp16's loss scaling see to
        it themselves. Other optimizers are told as a GradScaler does it, by a tensor: the norm is
        not known yet, for nothing here waits for a GPU.
        """
        self.profiler.phase("optimizer")
        max_norm = self.args.grad_clip or math.inf
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        if self.engine.deepspeed is None and self.accelerator.scaler is None:
            self.optimizer.optimizer.found_inf = (~norm.isfinite()).float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.grad_norm = norm if getattr(norm, "is_cuda", False) else float(norm)

    def end(self, step: int) -> bool:
        """Log the step; validate, write a sample and save where it is time. True: the run was told
        to stop, and has said its last words. Raises UsageError: no step works any more."""
        self.report(step)
        if self.gives_up:
            raise UsageError(self.give_up())
        reason, due = self.stop.reason(), self.is_time_to_save(step)
        if reason or self.stop.time_to_save or due:
            self.save(step)
            self.stop.saved()
        self.checkpointer.poll()
        if reason is None or step == self.learning_rate.total_steps:
            return False
        saved = self.close()
        if self.engine.is_main:
            say_stopped(self.folder, step, reason, saved)
        end_stopped([self.engine], saved)
        return True

    def report(self, step: int) -> None:
        """Log the step; validate and write a sample where it is time."""
        log, self.val_loss = self.log, None
        with log.pause():  # not training: throughput leaves it out
            profile = self.profiler.end_step(step)
        epoch = step * self.samples_per_step / len(self.train_set)
        log.step(step, self.rate, self.grad_norm, epoch)
        if profile:
            log.profile(step, *profile)
        if self.gives_up:
            return
        if self._is_time(step, self.args.eval_interval):
            self.val_loss = self.validate(step)
        if self.args.sample_interval and step % self.args.sample_interval == 0:
            self.write_sample(step)

    def is_time_to_save(self, step: int) -> bool:
        """By the validation, if there was one, or by --save_interval; to be asked once in a
        step."""
        is_best = self.checkpointer.is_best(self.val_loss)
        return is_best or self._is_time(step, self.args.save_interval)

    def save(self, step: int) -> None:
        """A checkpoint, after `report`."""
        with self.log.pause():
            self.checkpointer.save(step, self.val_loss)

    def close(self) -> bool:
        """Wait for the last checkpoint; False if it is not there."""
        saved = self.checkpointer.wait()
        self.log.close()
        return saved

    def validate(self, step: int) -> float | None:
        """Log the loss of the validation split after so many steps, and return it; None where there
        is no split, or the loss is not finite."""
        if not self.val_loader:
            return None
        with self.log.pause():
            bytes_per_token = self.val_set.bytes_per_token
            result = validate(self.model, self.val_loader, self.accelerator, bytes_per_token)
        self.log.validation(step, result)
        return result["loss"] if math.isfinite(result["loss"]) else None

    def write_sample(self, step: int) -> None:
        """What the model writes after so many steps."""
        with self.log.pause():
            self.samples.write(step)

    def _is_time(self, step: int, interval: int) -> bool:
        """Every `interval` steps, never if it is 0, and at the last step in any case."""
        is_last = step == self.learning_rate.total_steps
        return is_last or (interval > 0 and step % interval == 0)

    @property
    def gives_up(self) -> bool:
        """After `report`: there is nothing but gradients that are not finite."""
        return self.log.bad_in_row >= self.args.max_bad_steps

    def give_up(self) -> str:
        """Write down which samples the last step had; returns why the run ends."""
        self.checkpointer.wait()
        step = self.log.last_bad
        first, last = (step - 1) * self.samples_per_step, step * self.samples_per_step
        samples = self.sampler.indices(np.arange(first, last)).tolist()
        if self.engine.is_main:
            row = json.dumps({"step": step, "samples": samples})
            self.folder.bad_samples.write_text(row + "\n", encoding="utf-8")
        shown = ", ".join(map(str, samples[:16])) + (", ..." if len(samples) > 16 else "")
        return (
            f"{self.log.bad_in_row} steps in a row had a non-finite gradient and changed nothing; "
            f"the batch of step {step} was samples {shown} (all in the run's bad_samples.json); "
            "the last checkpoint is as it was: try a lower --learning_rate"
        )

    def finish(self) -> None:
        """Leave the weights, a sample and the report of a run that has come to its end. Raises
        UsageError: they are there, but the last checkpoint is not."""
        if not self.leave():
            raise UsageError(
                f"{self.folder.path}: the weights are there, the last checkpoint is not"
            )
        self.accelerator.end_training()

    def leave(self) -> bool:
        """Weights, sample and report; False on the main process: the last checkpoint is not
        there."""
        saved = self.checkpointer.wait()
        weights = self.built.state.weights()
        self.log.close()
        if self.engine.is_main:
            built, prompt_from, say = self.built, self.samples.prompt_from, self.log.say
            finish(self.args, self.folder, built.config, weights, built.lora, prompt_from, say)
            if self.log.divergence:
                say(f"\n{self.log.divergence}")
        return saved
