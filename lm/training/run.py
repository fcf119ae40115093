"""`Run`: the methods that the training loops in train_*.py call."""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lm.common.errors import UsageError, reported
from lm.data.dataset import WithNoise
from lm.data.order import MicroBatchSampler
from lm.data.shards import CONVERSATIONS, TEXT
from lm.data.tokenizer import open_tokenizer
from lm.engine.compilation import why_not_compile
from lm.engine.engine import Engine
from lm.training.build import build_model
from lm.training.checkpoint_writer import is_best, load_checkpoint
from lm.training.inputs import Inputs
from lm.training.log import TrainingLog
from lm.training.profiler import StepProfiler
from lm.training.results import write_sample
from lm.training.schedule import LearningRate
from lm.training.starting_point import settings_of
from lm.training.validation import validate, validation_loader, yardsticks
from model import IGNORE_INDEX
from model.experts import load_balance


class MicroBatch(NamedTuple):
    """The sequences of one forward and backward pass on one process."""

    tokens: Tensor  # (batch_size, length) int64, on the device of training
    targets: Tensor  # (batch_size, length) int64, on the same device; IGNORE_INDEX does not count
    n_targets: int  # number of targets that count in the loss
    starts: Tensor | None = None  # (batch_size, length), of conversations: see Transformer.forward
    weight: float = 1.0  # n_targets / mean n_targets of the step's micro-batches on all processes


# Share of the steps, at the end, that read only the first segmentation of a text: docs/recipe.md.
FIRST_SEGMENTATION_SHARE = 0.1


def sample_order(inputs: Inputs, engine: Engine) -> Iterable[list[int]]:
    """Return the sample indices of this process's micro-batches after `inputs.start`, endlessly."""
    args, train_set, done = inputs.args, inputs.train_set, inputs.start.step
    global_batch = args.global_batch(engine.processes)  # in sequences
    order = MicroBatchSampler(
        len(train_set),
        args.batch_size,
        rank=engine.accelerator.process_index,
        world_size=engine.processes,
        seed=args.seed,
        start=done * global_batch,
    )
    if not train_set.n_first:
        return order
    switch = round((1 - FIRST_SEGMENTATION_SHARE) * inputs.total_steps)  # later steps read `late`
    late = replace(order, n_samples=train_set.n_first, start=max(0, done - switch) * global_batch)
    return chain(islice(order, max(0, switch - done) * args.accumulation_steps), late)


def read_batches(inputs: Inputs, engine: Engine) -> Iterator[MicroBatch]:
    """Yield this process's micro-batches after `inputs.start`, endlessly. Their weights are 1."""
    device = engine.accelerator.device
    on_gpu = device.type == "cuda"
    samples: Dataset = inputs.train_set
    if share := inputs.args.token_noise:
        samples = WithNoise(inputs.train_set, share, inputs.args.seed)
    loader = DataLoader(
        samples,
        batch_sampler=sample_order(inputs, engine),
        num_workers=inputs.args.num_workers,
        pin_memory=on_gpu,
        generator=torch.Generator(),  # by default it would share dropout's generator
    )
    for samples in loader:
        n_targets = int((samples[1] != IGNORE_INDEX).sum())
        tokens, targets, *starts = (x.to(device, non_blocking=True) for x in samples)
        yield MicroBatch(tokens, targets, n_targets, *starts)


def with_weights(batches: Iterator[MicroBatch], n: int, engine: Engine) -> Iterator[MicroBatch]:
    """Give every target of a step the same weight in the gradient. A step has `n` micro-batches of
    each process. Every process must iterate."""
    while of_step := list(islice(batches, n)):
        n_targets = engine.total(sum(batch.n_targets for batch in of_step))
        mean = max(1, n_targets) / (n * engine.processes)
        yield from (batch._replace(weight=batch.n_targets / mean) for batch in of_step)


class Run:
    """One training run. Creating it builds the model and loads the checkpoint of a resumed run;
    lm/training/set_up.py loads --init_from. `runs` are the `Runs` that train side by side."""

    def __init__(self, inputs: Inputs, engine: Engine, runs, name: str = ""):
        self.inputs, self.engine, self.runs = inputs, engine, runs
        args, train_set, start = inputs.args, inputs.train_set, inputs.start
        self.args, self.accelerator, self.folder = args, engine.accelerator, start.folder
        self.first_step, self.total_steps = start.step + 1, inputs.total_steps
        self.teacher = inputs.teacher and inputs.teacher.load(engine, args.dtype)
        was_compiled = start.state.get("compiled")  # a resumed run needs the same kernels
        tokens = args.global_batch(1) * self.total_steps * train_set.tokens_per_sample
        flops = tokens * inputs.flops_per_token  # of this process in the whole run
        # None: the blocks are compiled.
        self.why_not_compiled = why_not_compile(args.compile, was_compiled, flops, engine)
        compiled = self.why_not_compiled is None
        self.work = inputs.workload(engine.processes, self.accelerator.device, compiled)
        self.model, self.optimizer, self.state = build_model(inputs, engine, self.work)
        self.val_loss: float | None = start.state.get("val_loss")  # after the latest step, if known
        self.saved_loss: float | None = None  # of the latest checkpoint, maybe still being written
        self.interrupted = False  # True if a stop request has ended a validation early
        self.learning_rate = LearningRate(args, self.total_steps)
        self._reduction = ExitStack()  # under ZeRO-2, what reduces the gradients once per step
        self._batches = read_batches(inputs, engine)
        if train_set.kind == CONVERSATIONS:  # in a text every target counts, the weights stay 1
            self._batches = with_weights(self._batches, args.accumulation_steps, engine)
        self.log = TrainingLog(inputs, self.accelerator, name)
        if start.checkpoint:
            load_checkpoint(start.checkpoint, engine, self.state, self.log.meter)
        self.profiler = StepProfiler(self.accelerator, self.folder.profile, args)
        self.val_loader = inputs.val_set and validation_loader(
            inputs.val_set, args.batch_size, args.eval_samples, self.accelerator
        )
        self.settings = settings_of(args, inputs.config, engine)
        lora = inputs.shapes.lora
        self.facts = {  # written to state.json of every checkpoint
            "model": inputs.config.to_dict(),
            "identity": inputs.identity,
            "processes": engine.processes,
            "compiled": compiled,
        } | ({"lora": vars(lora)} if lora else {})

    def steps(self) -> Iterator[int]:
        """Yield the step numbers from `first_step` to the last step or a stop request."""
        for step in range(self.first_step, self.total_steps + 1):
            if self.runs.stopped:
                return
            yield step

    def begin(self, step: int) -> None:
        """Set a step's learning rate. One reduction per step, under ZeRO-2, waits for `update`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step) * group["lr_factor"]
        if self.engine.coalesces:
            self._reduction.enter_context(self.model.coalesce_grad_reduction())
        self.profiler.begin_step(step)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield a step's micro-batches."""
        self.profiler.phase("data")
        for batch in islice(self._batches, self.args.accumulation_steps):
            yield batch
            self.profiler.phase("data")

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context of a forward and backward pass. DDP exchanges gradients in a step's last pass."""
        self.profiler.phase("forward")
        with self.accelerator.accumulate(self.model):
            yield

    def backward(
        self, loss: Tensor, batch: MicroBatch, routing: Tensor | None = None, **parts: Tensor
    ) -> None:
        """Run the backward pass of a micro-batch and record its loss for the log. `loss` is the
        mean over the targets that count; the engine divides it by --accumulation_steps. With the
        `routing` of experts the gradient includes the balancing loss; the logged loss does not.
        `parts` are detached means that are logged too."""
        self.profiler.phase("backward")
        trained = loss
        if routing is not None:
            config = self.inputs.config
            counts = batch.targets != IGNORE_INDEX
            balance = load_balance(routing, counts, config.num_experts_per_tok)
            trained = loss + config.router_aux_loss * balance["balancing_loss"]
            parts |= {name: value.detach() for name, value in balance.items()}
        # The mean over zero targets is NaN; its gradient must be zero.
        weighted = trained * batch.weight if batch.n_targets else trained.nan_to_num() * 0
        if self.engine.deepspeed is None:
            self.accelerator.backward(weighted)
        else:  # Accelerate's backward would also update the weights, which `update` does
            self.model.set_gradient_accumulation_boundary(self.accelerator.sync_gradients)
            self.model.backward(weighted)
        if batch.n_targets:
            share = batch.n_targets / (self.args.batch_size * self.inputs.train_set.seq_len)
            self.log.meter.add(share, loss=loss.detach(), **parts)

    def update(self) -> float | Tensor:
        """Clip the gradient to --grad_clip, update the weights, set the gradient to zero. Skip the
        update if the gradient's norm is not finite. Return the norm before clipping. Without
        DeepSpeed, the norm on a GPU is a tensor: reading it waits."""
        self.profiler.phase("optimizer")
        if self.engine.deepspeed is not None:
            self._reduction.close()  # reduces the gradients if no backward pass has reduced them
            self.model.set_gradient_accumulation_boundary(True)
            self.model.step()  # clips, updates or skips, and sets the gradient to zero
            return float(self.model.get_global_grad_norm())
        max_norm = self.args.grad_clip or math.inf
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        if self.accelerator.scaler is None:  # else fp16's loss scaling skips the update itself
            self.optimizer.optimizer.found_inf = (~norm.isfinite()).float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm if norm.is_cuda else float(norm)

    def end(self, step: int, grad_norm: float | Tensor) -> None:
        """Report the step (see `report`); save if it is time; at a stop request, save and stop."""
        self.report(step, grad_norm)
        self.runs.end(step)

    def report(self, step: int, grad_norm: float | Tensor) -> None:
        """Log, `evaluate`. Raises UsageError at --max_bad_steps non-finite gradients in a row."""
        with self.log.pause():
            profile = self.profiler.end_step(step)
        self.log.end_step(step, self.learning_rate(step), grad_norm)
        if profile:
            self.log.profile(step, *profile)
        most = self.args.max_bad_steps
        # If the norm is on a GPU, reading the counter waits for the GPU: it is read more rarely.
        interval = most if getattr(grad_norm, "is_cuda", False) else 1
        if self.is_time(step, interval) and (bad := int(self.log.meter.worst_in_row)) >= most:
            self.runs.wait()
            steps = f"{bad} steps in a row"
            raise UsageError(f"{steps} had a non-finite gradient: lower --learning_rate")
        self.evaluate(step)

    def evaluate(self, step: int) -> None:
        """Validate and write a sample if it is time."""
        is_due = self.is_time(step, self.args.eval_interval)
        self.val_loss = self.validate(step) if is_due else None
        if self.args.sample_interval and step % self.args.sample_interval == 0:
            self.write_sample(step)

    def validate(self, step: int) -> float | None:
        """Log and return the validation loss; None if it is not finite, if there are no data or
        after a stop request, which ends the validation on all processes before the same batch."""
        if not self.val_loader:
            return None
        with self.log.pause():
            data = self.inputs.val_set
            how = (self.accelerator, data.bytes_per_token, self.runs.stop.reason)
            result = validate(self.model, self.val_loader, *how)
            self.interrupted = result is None
            if self.interrupted:
                return None
            if step == self.total_steps and data.kind == TEXT and self.engine.is_main:
                with reported("gzip AND xz", self.log.say):
                    result |= yardsticks(data, open_tokenizer(self.folder.path))
        self.log.validation(step, result)
        return result["loss"] if math.isfinite(result["loss"]) else None

    def write_sample(self, step: int) -> None:
        """Write a sample (lm/training/results.py), but not after an interrupted validation."""
        if self.interrupted:
            return
        with self.log.pause():
            write_sample(step, self.state.whole_model(), self.inputs, self.log)

    def is_time_to_save(self, step: int) -> bool:
        """Return whether no checkpoint has a validation loss as low as the run's, --save_interval
        is due, or the run ends. Every process must call this."""
        if self.is_time(step, self.args.save_interval):
            return True
        if self.val_loss is None:
            return False
        pending = self.saved_loss if self.runs.is_writing else None
        return is_best(self.engine, self.folder, self.val_loss, pending)

    def is_time(self, step: int, interval: int) -> bool:
        """Return whether something is due that happens every `interval` steps, and at the end."""
        return step == self.total_steps or (interval > 0 and step % interval == 0)

    def finish(self) -> None:
        """Write the results, or say how to resume the run: see `Runs.finish`."""
        self.runs.finish()
