"""Build the model and the optimizer for an engine, and seed torch's random generators."""

import sys

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lm.common.errors import UsageError
from lm.engine.compilation import compile_blocks
from lm.engine.deepspeed_setup import (
    launch_fewer_kernels,
    partitioned_while_built,
    set_up_deepspeed,
)
from lm.engine.engine import KEPT, Engine
from lm.engine.memory import Workload, can_coalesce
from lm.engine.whole_tensors import TrainingState
from lm.training.inputs import Inputs
from lm.training.optimizer import build_optimizer, set_muon_layout
from model import Transformer
from model.sampled_softmax import sample_softmax


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's generators. On a GPU, wait for running kernels first."""
    if device.type != "cuda":
        return {"cpu": torch.get_rng_state()}
    torch.cuda.synchronize()
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(device)}


def restore_random(state: dict[str, Tensor], device: torch.device) -> None:
    """Set torch's generators to a state that `random_state` returned, maybe on another device."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def select_engine(engine: Engine) -> None:
    """Make Accelerate use the DeepSpeed configuration of this engine."""
    if engine.plugin is not None:
        engine.accelerator.state.select_deepspeed_plugin(engine.plugin)


def build_model(
    inputs: Inputs, engine: Engine, work: Workload
) -> tuple[nn.Module, torch.optim.Optimizer, TrainingState]:
    """Build a model with random initial weights, and its optimizer, as `accelerator.prepare`
    returns them. Trained parameters are updated in fp32, frozen parameters are in --dtype. Every
    process must call this. Raises UsageError if DeepSpeed rejects its configuration."""
    args, config, accelerator = inputs.args, inputs.config, engine.accelerator
    engine.fit_to(config.dim, work.trained)
    set_up_deepspeed(engine)
    torch.manual_seed(args.seed)  # the same initial weights on every process
    with partitioned_while_built(engine):
        model = Transformer(config)
        args.adapt(model)  # adds the adapters of LoRA, if any
    if args.sampled_softmax > 1:
        sample_softmax(model, args.sampled_softmax)
    # DeepSpeed moves a model to its GPU, but not a divided one.
    model.pos_cis = model.pos_cis.to(accelerator.device)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, args.dtype))
    for block in model.layers:
        block.recompute = args.gradient_checkpointing
    if work.compiled:
        compile_blocks(model)
    # DDP would broadcast this buffer, but every process has computed the same numbers.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["pos_cis"])
    optimizer = build_optimizer(model, args, engine)
    # A GPU's total memory, not its free memory, so that a resumed run decides in the same way.
    size = sys.maxsize if work.on_cpu else torch.cuda.mem_get_info(accelerator.device)[1]
    # If one GPU lacks the memory to reduce once per step, every GPU reduces in each micro-batch.
    engine.coalesces = engine.total(int(not can_coalesce(engine.strategy, work, size))) == 0
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
    except (ValueError, AssertionError) as error:  # DeepSpeed rejects its configuration
        raise UsageError(f"the engine cannot be started: {error}") from error
    if engine.processes > 1:
        KEPT.append(model)  # see lm/engine/engine.py
    if engine.coalesces and engine.strategy.fp32_sums:
        optimizer.optimizer.use_grad_accum_attribute = True  # without it, sums are in 16 bits
    if engine.deepspeed is not None:
        launch_fewer_kernels(optimizer.optimizer)
    set_muon_layout(model, engine)
    torch.manual_seed(args.seed + 1000003 * accelerator.process_index)  # other dropout on each rank
    return model, optimizer, TrainingState(engine, model, optimizer, inputs.shapes)
