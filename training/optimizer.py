"""The optimizer: AdamW, made here or by DeepSpeed from its configuration file, or Muon."""

from collections.abc import Sequence

import torch
from accelerate.utils import DummyOptim
from torch import nn

from training.arguments import TrainingArguments
from training.engine.deepspeed_config import ADAM_EPS
from training.engine.device import has_bf16
from training.engine.launch import Engine
from training.engine.partition import partitions, shape_of
from training.muon import Muon


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
    """Return the matrices of the blocks; with adapters A and B, each by itself.

    Embedding and output layer have a vector for every token, used rarely or often, and train better
    by AdamW (https://kellerjordan.github.io/posts/muon/).
    """
    return [p for p in model.layers.parameters() if p.requires_grad and p.dim() == 2]


def orthogonalizing_dtype(dtype: str) -> torch.dtype:
    """Return Muon's precision for a --dtype: bf16, or fp32 where training is in fp32.

    A GPU without bf16 (V100, T4) takes fp32, which costs time alone: in fp16 small gradients would
    be gone before they are normalised.
    """
    if dtype == "float32" or (torch.cuda.is_available() and not has_bf16()):
        return torch.float32
    return torch.bfloat16


def build_optimizer(model: nn.Module, args: TrainingArguments, engine: Engine):
    """Return the optimizer of --optimizer for `accelerator.prepare`; call `tell_layout` after it.

    AdamW: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101. Where DeepSpeed's file holds an
    "optimizer", a placeholder carries the parameter groups to it.
    """
    betas = (args.beta1, args.beta2)
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
        groups = [by_muon, *({**group, "betas": betas, "eps": ADAM_EPS} for group in by_adamw)]
        return Muon(groups, args.learning_rate, orthogonalizing_dtype(args.dtype))
    groups = parameter_groups(model, args.weight_decay)
    if "optimizer" in (engine.deepspeed or {}):
        return DummyOptim(groups, lr=args.learning_rate, weight_decay=args.weight_decay)
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=ADAM_EPS, fused=True)


def tell_layout(model: nn.Module, engine: Engine) -> None:
    """Tell Muon what lies where in the flat tensors that DeepSpeed has it step.

    `model` is as prepared.
    """
    if engine.deepspeed is None:
        return
    zero = model.optimizer
    if isinstance(zero.optimizer, Muon):
        for partition in partitions(zero, engine.accelerator.process_index):
            zero.optimizer.layout[partition.fp32] = partition


def set_learning_rate(optimizer, value: float) -> None:
    """Set each group's learning rate to value * group["lr_factor"] (default: 1)."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get("lr_factor", 1.0)
