"""Train in fp16 with DeepSpeed alone in two processes, because the programs refuse fp16 on a CPU.
In step 2 a gradient of process 1 is NaN. test_reliability.py starts this file."""

import json
import math
from functools import partial
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from lm.engine.deepspeed_setup import launch_fewer_kernels
from lm.engine.whole_tensors import gathered

CONFIG = json.loads((Path(__file__).parents[2] / "configs/fp16.json").read_text(encoding="utf-8"))


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    """Return a flat copy of the weights that this process computes with."""
    copies = []
    for parameter in model.parameters():
        with gathered(parameter):
            copies.append(parameter.detach().clone().flatten())
    return torch.cat(copies)


def train(stage: int) -> dict:
    """Take four steps; return a value of each: did a weight of this process change, is the norm of
    the gradient finite, how many steps were skipped so far, and the next loss scale."""
    torch.manual_seed(0)
    config = CONFIG | {
        **{"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1},
        **{"gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "bf16": {"enabled": False}},
        "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        "zero_optimization": CONFIG["zero_optimization"] | {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }
    layers = (torch.nn.Linear(8, 8, bias=False) for _ in range(4))
    engine, *_ = deepspeed.initialize(model=torch.nn.Sequential(*layers), config=config)
    launch_fewer_kernels(engine.optimizer)
    result = {"changed": [], "finite": [], "skipped": [], "scale": []}
    for step in (1, 2, 3, 4):
        before = weights_of(engine.module)
        loss = engine(torch.ones(1, 8, dtype=torch.float16)).square().mean()
        factor = math.nan if step == 2 and engine.global_rank == 1 else 1.0
        hook = engine.module[0].weight.register_hook(partial(torch.mul, other=factor))
        engine.backward(loss)
        hook.remove()
        engine.step()
        result["changed"].append(not torch.equal(before, weights_of(engine.module)))
        result["finite"].append(math.isfinite(engine.get_global_grad_norm()))
        result["skipped"].append(engine.skipped_steps)
        result["scale"].append(engine.optimizer.loss_scale)
    return result


if __name__ == "__main__":
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed asks before it trains in fp16
    results = {stage: train(stage) for stage in (1, 2, 3)}
    of_each = [None, None]
    torch.distributed.all_gather_object(of_each, results)
    if torch.distributed.get_rank() == 0:
        print(f"\nresults: {json.dumps(of_each)}", flush=True)
