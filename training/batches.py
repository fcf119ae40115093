"""The micro-batches of an optimizer step, on the device, with the weight of each in the step."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from torch import Tensor

from data.dataset import TokenStream, micro_batches
from data.order import LengthSampler, MicroBatchSampler
from model import IGNORE_INDEX
from training.arguments import TrainingArguments
from training.engine.launch import Engine


class MicroBatch(NamedTuple):
    """Sequences that one process feeds forward at once."""

    tokens: Tensor  # (batch_size, length), on the device
    targets: Tensor  # (batch_size, length); IGNORE_INDEX where a target does not count
    n_targets: int  # targets that count
    n_tokens: int  # tokens without padding
    weight: float = 1.0  # n_targets over the mean n_targets of the step's micro-batches


class StepBatches:
    """Read the training data in the order of the run, one optimizer step after the other.

    Every target of a global batch weighs the same in the gradient, whichever micro-batch holds it.
    Where all targets count, one micro-batch is read ahead. Where they do not, the micro-batches of
    a step are read together, because their weights need the number of targets on all processes.

    Args:
        start_step: the last step that was trained; reading begins behind it.
    """

    def __init__(
        self, train_set: TokenStream, args: TrainingArguments, engine: Engine, start_step: int
    ):
        self.train_set = train_set
        self.engine = engine
        self.accumulation_steps = args.accumulation_steps
        self.samples_per_step = args.global_batch(engine.processes)
        self.full_targets = args.batch_size * train_set.seq_len
        sampler = MicroBatchSampler
        if train_set.lengths is not None:
            lengths, whole = train_set.lengths, self.samples_per_step
            sampler = partial(LengthSampler, lengths=lengths, global_batch=whole)
        self.sampler = sampler(
            len(train_set),
            args.batch_size,
            rank=engine.accelerator.process_index,
            world_size=engine.processes,
            seed=args.seed,
            start=start_step * self.samples_per_step,
        )
        self._device = engine.accelerator.device
        on_gpu = self._device.type == "cuda"
        self._source = micro_batches(train_set, self.sampler, args.num_workers, pin_memory=on_gpu)
        self._next: MicroBatch | None = None

    def of_step(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the next step. Every process must call it."""
        if self.train_set.every_target_counts:
            for _ in range(self.accumulation_steps):
                batch, self._next = self._next or self._read(), self._read()
                yield batch
            return
        batches = [self._read() for _ in range(self.accumulation_steps)]
        count = self.engine.total(sum(batch.n_targets for batch in batches))
        mean = max(1, count) / (self.accumulation_steps * self.engine.processes)
        for batch in batches:
            yield batch._replace(weight=batch.n_targets / mean)

    def _read(self) -> MicroBatch:
        """Read a micro-batch and begin its copy to the device."""
        tokens, targets = next(self._source)
        n_targets = n_tokens = targets.numel()
        if not self.train_set.every_target_counts:
            counts = targets != IGNORE_INDEX
            n_targets = int(counts.sum())
            # A sample ends with a target that counts; behind it there is padding.
            n_tokens = int(counts.flip(1).cummax(1).values.sum())
        tokens, targets = (x.to(self._device, non_blocking=True) for x in (tokens, targets))
        return MicroBatch(tokens, targets, n_targets, n_tokens)
