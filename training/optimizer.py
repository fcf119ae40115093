"""AdamW, whoever makes it: this script or DeepSpeed from its configuration file."""

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim
from torch import nn

from training.arguments import TrainingArguments
from training.deepspeed_config import ADAM_EPS


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay towards zero; scales of norms, which stay near one, do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, args: TrainingArguments, accelerator: Accelerator):
    """AdamW (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101) for `accelerator.prepare`.

    Where DeepSpeed's file holds an "optimizer", a placeholder carries the parameter groups to it.
    """
    groups = parameter_groups(model, args.weight_decay)
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None and "optimizer" in plugin.deepspeed_config:
        return DummyOptim(groups, lr=args.learning_rate, weight_decay=args.weight_decay)
    betas = (args.beta1, args.beta2)
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=ADAM_EPS, fused=True)


def set_learning_rate(optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value
