"""The model and its optimizer, prepared for the engine that trains them, and their random state."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.errors import UsageError
from model import Transformer
from model.transformer import flops_per_token
from training.engine.compilation import Compilation, compile_blocks, decide_compilation
from training.engine.deepspeed_setup import divided_as_built, set_up_deepspeed
from training.engine.launch import KEPT, Engine
from training.engine.state import TrainingState
from training.optimizer import build_optimizer, tell_layout
from training.prepare import Prepared


@dataclass
class BuiltModel:
    compilation: Compilation
    model: nn.Module  # as prepared for the engine, like the optimizer
    optimizer: torch.optim.Optimizer
    state: TrainingState  # of both


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed torch's generators, the only ones that training uses; each rank gets other numbers."""
    torch.manual_seed(seed + 1000003 * rank)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's generators; on a GPU wait for the work that it was given."""
    if device.type != "cuda":
        return {"cpu": torch.get_rng_state()}
    torch.cuda.synchronize()
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(device)}


def restore_random(state: dict[str, Tensor], device: torch.device) -> None:
    """Set torch's generators to what `random_state` returned, of a GPU perhaps elsewhere."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def build_model(prepared: Prepared, engine: Engine) -> BuiltModel:
    """Build the model with weights drawn at random, and its optimizer. Every process must call it.

    Frozen parameters are held in the precision of forward and backward. The random generators are
    seeded for what comes after. Raises UsageError: the engine cannot be started, or cannot compile.
    """
    args, config, accelerator = prepared.args, prepared.config, engine.accelerator
    dtype = getattr(torch, args.dtype)
    tokens = args.global_batch(1) * prepared.total_steps * prepared.train_set.tokens_per_sample
    flops, before = flops_per_token(config) * tokens, prepared.start.state.get("compiled")
    compilation = decide_compilation(args.compile, before, flops, engine)
    engine.fit_to(config.dim, prepared.n_trained)
    set_up_deepspeed(engine)
    seed_everything(args.seed)  # the same initial weights on every process
    with divided_as_built(engine):
        model = Transformer(config)
        args.adapt(model)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    for block in model.layers:
        block.recompute = args.gradient_checkpointing
    if compilation.on:
        compile_blocks(model)
    # DDP would broadcast the table of rotations, and NCCL cannot send complex numbers.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["pos_cis"])
    optimizer = build_optimizer(model, args, engine)
    try:
        model, optimizer = accelerator.prepare(model, optimizer)
    except (ValueError, AssertionError) as error:  # DeepSpeed refuses its configuration
        raise UsageError(f"the engine cannot be started: {error}") from error
    if engine.processes > 1:
        KEPT.append(model)
    tell_layout(model, engine)
    seed_everything(args.seed, rank=accelerator.process_index)  # other dropout masks on each
    return BuiltModel(compilation, model, optimizer, TrainingState(engine, model, optimizer))
