"""The optimizer, AdamW or Muon, and its learning rate."""

import math
from collections.abc import Sequence

import torch
from accelerate.utils import DummyOptim
from torch import nn

from common.errors import UsageError
from training.arguments import TrainingArguments
from training.engine.deepspeed_config import ADAM_EPS
from training.engine.device import has_bf16
from training.engine.launch import Engine
from training.engine.partition import partitions, shape_of
from training.muon import Muon

MAX_DEFAULT_WARMUP = 2000


def count_steps(args: TrainingArguments, n_samples: int, processes: int) -> int:
    """Return the optimizer steps of the whole run: --max_steps, or those of --epochs."""
    return args.max_steps or math.ceil(args.epochs * n_samples / args.global_batch(processes))


class LearningRate:
    """Learning rate as a function of the step, counted from 1: a resume has nothing to restore.

    Linear warm-up reaches the peak at step `warmup_steps`. Then down to min_ratio·peak go
    - cosine: in half a cosine wave (Loshchilov and Hutter, https://arxiv.org/abs/1608.03983);
    - linear: in a straight line;
    - wsd: in a straight line over the last decay_fraction of all steps (Hu et al.,
      https://arxiv.org/abs/2404.06395).

    Raises UsageError: warm-up beyond the last step.
    """

    def __init__(self, args: TrainingArguments, total_steps: int):
        self.schedule, self.total_steps = args.lr_schedule or "cosine", total_steps
        self.peak, self.min_ratio = args.learning_rate, args.min_lr_ratio
        self.decay_fraction, self.warmup_steps = args.decay_fraction, args.warmup_steps
        if self.warmup_steps is None:
            self.warmup_steps = min(MAX_DEFAULT_WARMUP, total_steps // 20)
        if (warmup := self.warmup_steps) > total_steps:
            raise UsageError(f"--warmup_steps {warmup}: the whole run has {total_steps} steps")

    def __call__(self, step: int) -> float:
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        start = self.warmup_steps
        if self.schedule == "wsd":
            start = max(start, self.total_steps - round(self.decay_fraction * self.total_steps))
            if step <= start:
                return self.peak
        progress = min(1.0, (step - start) / max(1, self.total_steps - start))
        wave = 0.5 * (1 + math.cos(math.pi * progress))
        share = wave if self.schedule == "cosine" else 1 - progress
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * share)


def set_learning_rate(optimizer, value: float) -> None:
    """Set each group's learning rate to value * group["lr_factor"] (default: 1)."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get("lr_factor", 1.0)


def parameter_groups(
    model: nn.Module, weight_decay: float, without: Sequence[nn.Parameter] = ()
) -> list[dict]:
    """Return two groups: matrices decay towards zero; scales of norms, near one, do not."""
    left_out = {id(p) for p in without}
    parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in left_out]
    groups = [
        {"params": [p for p in parameters if len(shape_of(p)) > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if len(shape_of(p)) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def muon_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices of the blocks; with adapters A and B, each by itself."""
    return [p for p in model.layers.parameters() if p.requires_grad and p.dim() == 2]


def build_optimizer(model: nn.Module, args: TrainingArguments, engine: Engine):
    """Return the optimizer of --optimizer for `accelerator.prepare`; call `tell_layout` after it.
    Where DeepSpeed's file holds an "optimizer", a placeholder carries the parameter groups to it.
    """
    adam = {"betas": (args.beta1, args.beta2), "eps": ADAM_EPS}
    if args.optimizer == "muon":
        matrices = muon_matrices(model)
        by_muon = {
            "params": matrices,
            "algorithm": "muon",
            "momentum": args.muon_momentum,
            "weight_decay": args.weight_decay,
            "lr_factor": args.muon_learning_rate / args.learning_rate,
        }
        by_adamw = parameter_groups(model, args.weight_decay, without=matrices)
        # A GPU without bf16 takes fp32: in fp16 small gradients would be gone before they count.
        in_fp32 = args.dtype == "float32" or (torch.cuda.is_available() and not has_bf16())
        dtype = torch.float32 if in_fp32 else torch.bfloat16
        return Muon([by_muon, *(group | adam for group in by_adamw)], args.learning_rate, dtype)
    groups = parameter_groups(model, args.weight_decay)
    if "optimizer" in (engine.deepspeed or {}):
        return DummyOptim(groups, lr=args.learning_rate, weight_decay=args.weight_decay)
    return torch.optim.AdamW(groups, lr=args.learning_rate, fused=True, **adam)


def tell_layout(model: nn.Module, engine: Engine) -> None:
    """Tell Muon what lies where in the flat tensors that DeepSpeed has it step."""
    if engine.deepspeed and isinstance(muon := model.optimizer.optimizer, Muon):
        for partition in partitions(model.optimizer, engine.accelerator.process_index):
            muon.layout[partition.fp32] = partition
