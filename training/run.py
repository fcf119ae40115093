"""A training under way: the verbs of which the pages train_*.py are made."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from common.errors import UsageError
from training.batches import MicroBatch, StepBatches
from training.build import BuiltModel
from training.checkpointing import Checkpointer, load_checkpoint
from training.engine.launch import Engine
from training.finish import finish, say_stopped
from training.interruption import StopRequest, end_stopped
from training.log import TrainingLog
from training.optimizer import set_learning_rate
from training.prepare import Prepared
from training.profiler import StepProfiler
from training.samples import SampleWriter
from training.schedule import LearningRate
from training.teacher import Teacher
from training.validation import validate, validation_loader


@dataclass(eq=False)
class Run:
    """One step is `begin`; a forward pass and `backward` for each of the `micro_batches`;
    `clip_gradients` and the optimizer's step; and `end`. The training pages spell it out.
    """

    prepared: Prepared  # what is trained on which data; a checkpoint that it names is loaded
    engine: Engine
    built: BuiltModel  # the model with its initial weights, and the optimizer
    stop: StopRequest
    teacher: Teacher | None = None  # whose logits the loss compares
    name: str = ""  # begins every log line, where several runs are trained side by side

    def __post_init__(self):
        prepared, engine, built = self.prepared, self.engine, self.built
        start, train_set = prepared.start, prepared.train_set
        args = self.args = prepared.args
        self.accelerator = engine.accelerator
        self.folder = start.folder
        self.first_step = start.step + 1
        self.model, self.optimizer = built.model, built.optimizer
        self.total_steps = prepared.total_steps
        self.learning_rate = LearningRate.from_arguments(args, self.total_steps)
        self.batches = StepBatches(train_set, args, engine, start.step)
        flops = prepared.shapes.flops_per_token(train_set.tokens_per_sample)
        if self.teacher:
            forward = self.teacher.found.shapes.flops_per_token(train_set.tokens_per_sample) / 3
            flops += forward  # a third of what training takes
        self.log = TrainingLog(
            self.accelerator,
            self.folder.metrics,
            log_interval=args.log_interval,
            tokens_per_step=self.batches.samples_per_step * train_set.tokens_per_sample,
            flops_per_token=flops,
            total_steps=self.total_steps,
            first_step=self.first_step,
            parts=args.logged,
            name=self.name,
        )
        if start.checkpoint:
            load_checkpoint(start.checkpoint, engine, built.state, self.log.meter)
        self.profiler = StepProfiler(self.accelerator, self.model, self.folder.profile, args)
        self.val_loader = prepared.val_set and validation_loader(
            prepared.val_set, args.batch_size, args.eval_samples, self.accelerator
        )
        prompt_from = prepared.val_set or train_set
        self.samples = SampleWriter(
            args, self.folder.samples, built.state.whole_model, prompt_from, self.log
        )
        self.checkpointer = Checkpointer(prepared, engine, built, self.log)

    def steps(self) -> Iterator[int]:
        """Yield the optimizer steps to take, counted from 1."""
        self.model.train()
        yield from range(self.first_step, self.total_steps + 1)

    def begin(self, step: int) -> None:
        """Set the learning rate, now, because DeepSpeed steps inside `backward`; profile if due."""
        set_learning_rate(self.optimizer, self.learning_rate(step))
        self.profiler.begin_step(step)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the step, on the device."""
        self.profiler.phase("data")
        for batch in self.batches.of_step():
            yield batch
            self.profiler.phase("data")

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Average the gradients of the step's micro-batches; exchange them as seldom as possible.

        Forward pass and `backward` of a micro-batch belong in here.
        """
        self.profiler.phase("forward")
        with self.accelerator.accumulate(self.model):
            yield

    def backward(self, loss: Tensor, batch: MicroBatch, **parts: Tensor) -> None:
        """Add the gradient of a micro-batch's loss, and note the loss for the log.

        Args:
            loss: mean over the targets of the micro-batch that count.
            parts: detached means over the same targets, by the names in `args.logged`.
        """
        self.profiler.phase("backward")
        # The mean over no target is not a number; its gradient counts as zero.
        weighted = loss * batch.weight if batch.n_targets else loss.nan_to_num() * 0
        self.accelerator.backward(weighted)
        if batch.n_targets:
            share = batch.n_targets / self.batches.full_targets
            self.log.meter.add(share, loss=loss.detach(), **parts)
        self.log.clock.tokens += batch.n_tokens

    def clip_gradients(self) -> float | Tensor:
        """Scale the gradient to a norm of --grad_clip at most; return the norm before, on a GPU as
        a tensor that has yet to be computed.

        A step whose norm is not finite is left out. DeepSpeed and the loss scaling of fp16 see to
        that themselves. Other optimizers are told by `found_inf`, as a GradScaler tells them.
        """
        self.profiler.phase("optimizer")
        max_norm = self.args.grad_clip or math.inf
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        if self.engine.deepspeed is None and self.accelerator.scaler is None:
            self.optimizer.optimizer.found_inf = (~norm.isfinite()).float()
        return norm if getattr(norm, "is_cuda", False) else float(norm)

    def end(self, step: int, grad_norm: float | Tensor) -> bool:
        """Do as `report` does, and save where it is time. Return whether the run was asked to stop;
        it is saved then. Raises UsageError: see `report`."""
        val_loss = self.report(step, grad_norm)
        reason = self.stop.reason()
        if reason or self.stop.time_to_save or self.is_time_to_save(step, val_loss):
            self.save(step, val_loss)
            self.stop.saved()
        if reason is None or step == self.total_steps:
            return False
        saved = self.close()
        if self.engine.is_main:
            say_stopped(self.folder, step, reason, saved)
        end_stopped([self.engine], saved)
        return True

    def report(self, step: int, grad_norm: float | Tensor) -> float | None:
        """Log the step; validate and write a sample where it is time. Return the validation loss,
        None without a validation.

        Raises UsageError: --max_bad_steps steps in a row had a gradient that is not finite, which
        is looked at every so many steps.
        """
        with self.log.clock.pause():
            profile = self.profiler.end_step(step)
        epoch = step * self.batches.samples_per_step / len(self.prepared.train_set)
        self.log.step(step, self.learning_rate(step), grad_norm, epoch)
        if profile:
            self.log.profile(step, *profile)
        # Seldom, because looking waits for a GPU.
        if self._is_time(step, self.args.max_bad_steps):
            self._require_good_steps(step)
        is_due = self._is_time(step, self.args.eval_interval)
        val_loss = self.validate(step) if is_due else None
        if self.args.sample_interval and step % self.args.sample_interval == 0:
            self.write_sample(step)
        return val_loss

    def is_time_to_save(self, step: int, val_loss: float | None) -> bool:
        """Return whether a checkpoint is due, by the best validation or by --save_interval."""
        is_best = val_loss is not None and val_loss < self.checkpointer.lowest
        return is_best or self._is_time(step, self.args.save_interval)

    def save(self, step: int, val_loss: float | None) -> None:
        """Begin a checkpoint; a thread writes it behind training."""
        with self.log.clock.pause():
            self.checkpointer.save(step, val_loss)

    def close(self) -> bool:
        """Wait for the last checkpoint and close the log; return whether it was saved."""
        saved = self.checkpointer.wait()
        self.log.close()
        return saved

    def validate(self, step: int) -> float | None:
        """Log the loss of the validation split and return it; None where there is no split, or the
        loss is not finite."""
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
            self.samples.write(step)

    def _is_time(self, step: int, interval: int) -> bool:
        """Return True every `interval` steps (0: never) and at the last step."""
        return step == self.total_steps or (interval > 0 and step % interval == 0)

    def _require_good_steps(self, step: int) -> None:
        """Raise UsageError, and write down the samples of this step, after max_bad_steps steps in a
        row whose gradient was not finite."""
        count = self.log.meter.bad_in_row()
        if count < self.args.max_bad_steps:
            return
        self.checkpointer.wait()
        size = self.batches.samples_per_step
        samples = self.batches.sampler.indices(np.arange((step - 1) * size, step * size)).tolist()
        if self.engine.is_main:
            row = {"step": step, "samples": samples}
            self.folder.bad_samples.write_text(json.dumps(row) + "\n", encoding="utf-8")
        raise UsageError(
            f"{count} steps in a row had a non-finite gradient and changed nothing; the batch of "
            f"step {step} was samples {', '.join(map(str, samples[:16]))} (all in "
            f"{self.folder.bad_samples}); try a lower --learning_rate"
        )

    def finish(self) -> None:
        """Leave weights, a sample and the report of a run that came to its end. Raises UsageError:
        see `leave_results`."""
        self.leave_results()
        self.accelerator.end_training()

    def leave_results(self) -> None:
        """Write weights, sample and report.

        Raises UsageError: the weights are there, but the last checkpoint is not.
        """
        weights = self.built.state.weights()
        saved = self.close()
        if self.engine.is_main:
            config, lora = self.prepared.config, self.prepared.shapes.lora
            prompt_from, say = self.samples.prompt_from, self.log.say
            finish(self.args, self.folder, config, weights, lora, prompt_from, say)
        if not saved:
            path = self.folder.path
            raise UsageError(f"{path}: the weights are there, the last checkpoint is not")
