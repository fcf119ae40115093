"""This project's own training step, made of the training script's functions."""

import itertools
import math
import os
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.flags import training_flags
from benchmarks.work import BETAS, GRAD_CLIP, LEARNING_RATE, VOCAB_SIZE, WEIGHT_DECAY, Work
from common.errors import UsageError
from model import LMConfig
from training.arguments import TrainingArguments, parse_arguments


def can_compile() -> bool:
    """Whether this version of the training script has --compile."""
    return "compile" in {item.name for item in fields(TrainingArguments)}


def command_line(work: Work, compiled: bool, extra: str = "") -> list[str]:
    """The training script's flags for this work; `extra`, as typed in a shell, comes last.

    Raises:
        UsageError: `extra` cannot be read.
    """
    flags = {
        "dim": work.dim,
        "n_layers": work.n_layers,
        "n_heads": work.n_heads,
        "n_kv_heads": work.n_kv_heads,
        "max_seq_len": work.seq_len,
        "batch_size": work.batch_size,
        "accumulation_steps": work.accumulation_steps,
        "dtype": work.dtype,
        "learning_rate": LEARNING_RATE,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "weight_decay": WEIGHT_DECAY,
        "grad_clip": GRAD_CLIP,
        "seed": work.seed,
        "log_with": "none",
    }
    if can_compile():
        flags["compile"] = "on" if compiled else "off"
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return words + training_flags(extra)


def check_extra(work: Work, extra: str) -> None:
    """Refuse flags that would make ours another work than the peers'.

    Tokens and FLOPs are credited by `work`, so all that it fixes stays as it is, the shape of the
    model included; whether it is compiled is said by a contender's name.

    Raises:
        UsageError, ConfigError: such a flag, or one that the training script refuses.
    """
    plain, shape = parse_arguments(command_line(work, False))
    args, settings = parse_arguments(command_line(work, False, extra))
    free = ("use_flash_attn", "optimizer", "muon_learning_rate", "muon_momentum")
    wanted = vars(plain) | LMConfig(**shape).to_dict()
    given = vars(args) | LMConfig(**settings).to_dict()
    for name in wanted:
        if name not in free and given[name] != wanted[name]:
            raise UsageError(
                f"--{name} is the same for all contenders; free are "
                + ", ".join(f"--{item}" for item in free)
            )


class LastLoss:
    """Stands in for `TrainingLog`: keeps a micro-batch's loss on the device, reports nothing."""

    def __init__(self):
        self.loss: Tensor | None = None

    def micro_batch(self, loss: Tensor) -> None:
        self.loss = loss


class OurStep:
    """`optimizer_step` of the training script, on the engine that the environment chooses.

    Args:
        work: what to do.
        options: "compiled" (bool) and "flags" (more flags of the training script, one string).
    """

    def __init__(self, work: Work, options: dict):
        # The imports take seconds, and only this contender needs them.
        from train_pretrain_accelerate import build_model, optimizer_step
        from training.engine.launch import build_engine
        from training.profiler import StepProfiler

        words = command_line(work, options["compiled"], options.get("flags", ""))
        args, model_settings = parse_arguments(words)
        engine = build_engine(args)
        accelerator = engine.accelerator
        config = LMConfig(**model_settings | {"vocab_size": VOCAB_SIZE})
        model, optimizer = build_model(config, args, accelerator, options["compiled"])
        model.train()
        self.device = accelerator.device
        self.parameters = accelerator.unwrap_model(model).num_parameters()
        self.description = engine.name
        self._log = LastLoss()
        self._optimizer_step = optimizer_step
        batches = work.batches(accelerator.process_index, self.device)
        self._run = SimpleNamespace(
            args=args,
            accelerator=accelerator,
            model=model,
            optimizer=optimizer,
            batches=itertools.cycle(batches),
            log=self._log,
            # Without --profile its phases do nothing.
            profiler=StepProfiler(accelerator, model, Path(os.devnull), args),
        )

    def step(self) -> None:
        grad_norm = self._optimizer_step(self._run)
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient's norm is {grad_norm}")

    def loss(self) -> float:
        """Of the last micro-batch; waits for the device."""
        return float(self._log.loss)

    def wait(self) -> None:
        """Until every rank is here, so that their clocks start together."""
        if self._run.accelerator.num_processes > 1:
            torch.distributed.barrier()
