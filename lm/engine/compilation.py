"""Decide whether torch.compile saves time in a run, and compile the blocks of the model."""

import os
import re
import warnings
from pathlib import Path
from tempfile import gettempdir

import torch

from lm.common.errors import UsageError
from lm.engine.agreement import on_main_process
from lm.engine.engine import Engine
from model import Transformer
from model.loss import cross_entropy
from model.sampled_softmax import SampledLoss

CACHE = Path("out/compiled")  # later runs load compiled code from here
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # PyTorch's; it names the folder of compiled code
BREAKS = re.compile(r"""[\s'"\\]""")  # in a path, these break the C++ command that PyTorch writes
# Compiling shortens a run of at least this many model FLOPs per process (run_accelerate.sh measures
# instead). On two CPU cores it took 10 s and saved 20%, which is 10 s of 50 s at 0.4 TFLOP/s. On an
# H200 it took 10 s too, at about 200 TFLOP/s.
WORTH_FLOPS = {"cpu": 2e13, "cuda": 1e16}


def should_compile(wanted: str, run_flops: float, device: torch.device) -> bool:
    """Return whether a new run should compile; `obstacle` says if it can. `wanted` is --compile."""
    return wanted == "on" or (wanted == "auto" and run_flops >= WORTH_FLOPS[device.type])


def why_not_compile(
    wanted: str, recorded: bool | None, run_flops: float, engine: Engine
) -> str | None:
    """Return why a run is not compiled, or None if it is compiled. Every process must call this.
    `recorded` says if a resumed run was compiled (None: a new run). "auto" keeps this choice if
    possible, because compiled kernels round differently. `run_flops` counts model FLOPs per
    process. Raises UsageError if --compile is on, but compiling fails here."""
    device = engine.accelerator.device
    if wanted == "off":
        return "--compile off"
    why = None
    if engine.divides_model:  # torch.compile would compile again whenever weights are gathered
        why = "under ZeRO-3 compiling takes more time than it saves"
    elif recorded is False:
        why = "the run was not compiled before it was stopped"
    elif recorded is None and not should_compile(wanted, run_flops, device):
        why = "in so short a run compiling takes more time than it saves"
    if wanted == "auto" and why:
        return f"{why}; --compile on forces it"
    reason = on_main_process(engine, lambda: obstacle(device))
    if reason and wanted == "on":
        raise UsageError(f"cannot compile: {reason}; pass --compile off")
    return reason


def compile_blocks(model: Transformer) -> None:
    """Compile the blocks, the final norm and the loss in place. All blocks share compiled code."""
    choose_cache()
    # PyTorch warns about the complex rotation table. The model reads it as pairs of real numbers.
    warnings.filterwarnings("ignore", message="Torchinductor does not support code gen")
    # torch.compile would split graphs where DDP's buckets end. A block is small: keep it whole.
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit += 8  # several models share this limit
    for module in (*model.layers, model.norm):
        module.compile(dynamic=False)
    # Sampled pieces change their number in each micro-batch.
    changes = isinstance(model.next_token_loss, SampledLoss)
    model.next_token_loss.cross_entropy = torch.compile(cross_entropy, dynamic=changes)


def choose_cache() -> None:
    """Let PyTorch keep compiled code in CACHE, unless the user has chosen a folder. If the path of
    CACHE breaks the C++ command, PyTorch chooses: a folder per user, for example in /tmp."""
    if not BREAKS.search(str(CACHE.absolute())):
        os.environ.setdefault(CACHE_VARIABLE, str(CACHE.absolute()))


def obstacle(device: torch.device) -> str | None:
    """Compile a one-line function; return why compiling fails on this machine, or None."""
    choose_cache()
    try:
        if cache := os.environ.get(CACHE_VARIABLE):  # else PyTorch fails while it is imported
            Path(cache).mkdir(parents=True, exist_ok=True)
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
    except Exception as error:  # a compiler that is missing or broken can raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        folders = (os.environ.get(CACHE_VARIABLE, ""), gettempdir(), torch.__path__[0])
        torn = re.search(r"C\+\+ compile error|No closing quotation", str(error))
        if torn and (broken := [*filter(BREAKS.search, folders)]):
            reason = f"a space or quote breaks PyTorch's C++ command: move {broken[0]}"
        return f"torch.compile fails here: {reason[:200]}"
    return None
