"""The model and its optimizer, prepared for the engine that trains them."""

from dataclasses import dataclass

import torch
from torch import nn

from common.errors import UsageError
from model import Transformer
from training.engine.compilation import Compilation, compile_blocks
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


def build_model(prepared: Prepared, engine: Engine) -> BuiltModel:
    """Build the model with weights drawn at random, and its optimizer.

    Frozen parameters are held in the precision of forward and backward, under every engine. The
    random generators are seeded for what comes after. Every process must call this.

    Raises UsageError: the engine cannot be started, or cannot compile what it needs.
    """
    args, config, accelerator = prepared.args, prepared.config, engine.accelerator
    dtype = getattr(torch, args.dtype)
    compilation = prepared.compilation(engine)
    engine.fit_to(config.dim, prepared.n_trained)
    set_up_deepspeed(engine, prepared.shapes, dtype.itemsize)
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
