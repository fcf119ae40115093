"""This project's own training step: a real `Run`, on random tokens, and the verbs of the page."""

import itertools
import math
import tempfile
import time
from pathlib import Path

from torch import Tensor

from benchmarks.work import Work
from common.errors import stop_in_order
from data.dataset import PackedDataset
from runs.folder import RunFolder
from training.arguments import TrainingArguments
from training.engine.compilation import Compilation
from training.engine.launch import Engine, build_engine
from training.resume import StartingPoint
from training.run import Run
from training.setup import build_model


class RandomTokens(PackedDataset):
    """What a Run asks of the data set from which its micro-batches would come."""

    split = "train"
    description = {"tokenizer_sha256": "", "splits": {"train": {"shards": []}}}  # noqa: RUF012

    def __init__(self, seq_len: int):
        self.seq_len = seq_len

    def __len__(self) -> int:
        return 1


def arguments(work: Work, optimizer: str = "adamw", recompute: str = "off") -> TrainingArguments:
    return TrainingArguments(
        batch_size=work.batch_size,
        accumulation_steps=work.accumulation_steps,
        dtype=work.dtype,
        optimizer=optimizer,
        warmup_steps=0,
        gradient_checkpointing=recompute,
        seed=work.seed,
    )


def build_run(
    work: Work,
    compiled: bool,
    optimizer: str = "adamw",
    recompute: str = "off",
    engine: Engine | None = None,
) -> Run:
    """A run on the engine that the environment chooses, unless there is one, made to take steps and
    for nothing else: it leaves nothing on the disk."""
    args = arguments(work, optimizer, recompute)
    engine = engine or build_engine(args)
    built = build_model(work.config, args, engine, Compilation(compiled, "as asked"))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            args=args,
            engine=engine,
            start=StartingPoint(RunFolder(Path(folder))),
            built=built,
            train_set=RandomTokens(work.seq_len),
            val_set=None,
            total_steps=2**60,
            started=time.monotonic(),
        )
        run.log.close()  # collects losses, and has nobody to tell
    stop_in_order()  # a Run only notes a signal, to stop between two steps
    run.batches = itertools.cycle(
        work.batches(run.accelerator.process_index, run.accelerator.device)
    )
    run.model.train()
    return run


def compute_gradient(run: Run, step: int) -> Tensor:
    """An optimizer step as the page takes it, but for `run.update`; the last micro-batch's loss."""
    run.begin(step)
    for tokens, targets in run.micro_batches():
        with run.accumulate():
            loss = run.model(tokens, targets).loss
            run.backward(loss)
    return loss.detach()


class OurStep:
    """One optimizer step of the training script, as often as it is asked for."""

    def __init__(
        self, work: Work, compiled: bool, optimizer: str = "adamw", recompute: str = "off"
    ):
        self.run = build_run(work, compiled, optimizer, recompute)
        self.device, self.engine = self.run.accelerator.device, self.run.engine.name
        self._steps = itertools.count(1)

    def step(self) -> None:
        self.forward_backward()
        self.update()

    def forward_backward(self) -> None:
        self._loss = compute_gradient(self.run, next(self._steps))

    def update(self) -> None:
        """Clip and step.

        Raises:
            FloatingPointError: the gradient is not finite, so that nothing was stepped.
        """
        self.run.update()
        if not math.isfinite(self.run.grad_norm):
            raise FloatingPointError(f"the gradient's norm is {self.run.grad_norm}")

    def loss(self) -> float:
        """Of the last micro-batch; waits for the device."""
        return float(self._loss)
