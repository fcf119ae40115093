"""torch.compile where it pays, block by block: one is compiled for all."""

import os
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from common.errors import UsageError
from model import Transformer
from training.engine.launch import Engine
from training.engine.main_process import on_main_process

CACHE = Path("out/compiled")  # where the next run finds compiled code again
# Model FLOPs of a run from which compiling is faster in sum (docs/performance.md);
# a guess for a GPU: 40 s at 200 TFLOP/s.
WORTH_FLOPS = {"cpu": 2e13, "cuda": 3e16}


class Compilation(NamedTuple):
    on: bool
    why: str

    def __str__(self) -> str:
        return f"{'yes' if self.on else 'no'} ({self.why})"


def decide_compilation(
    wanted: str, recorded: bool | None, run_flops: float, engine: Engine
) -> Compilation:
    """Decide whether to compile, the same on every process; all must call this.

    "auto" keeps to what a resumed run did (`recorded`, None for a new run): compiled
    kernels round differently. `run_flops`: model FLOPs of the run on one process.
    Raises UsageError: --compile on, but compiling does not work here.
    """
    device = engine.accelerator.device
    if wanted == "off":
        return Compilation(False, "--compile off")
    why = None
    if engine.divides_model:  # weights that come and go look like new code
        why = "under ZeRO-3 it costs more than it gains"
    elif recorded is False:
        why = "as before the run was stopped"
    elif recorded is None and run_flops < WORTH_FLOPS[device.type]:
        why = "the run is too short to gain back its time"
    if wanted == "auto" and why:
        return Compilation(False, f"{why}; --compile on forces it")
    reason = on_main_process(engine, lambda: obstacle(device))
    if reason is None:
        return Compilation(True, "block by block, during the first step")
    if wanted == "on":
        raise UsageError(f"cannot compile: {reason}; pass --compile off")
    return Compilation(False, reason)


def compile_blocks(model: Transformer) -> None:
    """Compile the blocks, the final norm and the loss in place."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE.absolute()))
    # Said of the rotation table, which is read as pairs of real numbers.
    warnings.filterwarnings("ignore", message="Torchinductor does not support code gen")
    # DDP would split graphs where its buckets end; blocks are small already.
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit += 8  # for several models
    for module in (*model.layers, model.norm, model.token_loss):
        module.compile(dynamic=False)


def obstacle(device: torch.device) -> str | None:
    """Compile a line; return why that does not work here, None if it does."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE.absolute()))
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
    except Exception as error:  # whatever a compiler or its absence brings about
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"torch.compile fails here: {reason[:200]}"
    return None
