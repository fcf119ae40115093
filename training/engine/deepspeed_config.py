"""DeepSpeed's JSON file and the flags, made one: flags fill "auto", a contradiction is an error."""

import json
import shutil
from pathlib import Path

import torch

from common.errors import UsageError
from training.arguments import TrainingArguments

# Fields that other people's files leave to the Hugging Face Trainer. Buckets as in ds_config.json,
# in elements.
AUTO_DEFAULTS = {
    "zero_optimization.overlap_comm": True,
    "zero_optimization.reduce_bucket_size": 50_000_000,
    "zero_optimization.allgather_bucket_size": 50_000_000,
}
ADAM_EPS = 1e-8
# AdamW by its names in DeepSpeed's files. It compiles its own at first use, unless "torch_adam" is
# true.
OPTIMIZERS = ("Adam", "AdamW")
ZERO_STAGES = (1, 2)  # those whose state training/engine/state.py can put together


def read_config(path: str) -> dict:
    """Raises UsageError: not there, not JSON, or without "zero_optimization"."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"DeepSpeed configuration {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"DeepSpeed configuration {path}: not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        raise UsageError(f'DeepSpeed configuration {path}: needs a "zero_optimization" section')
    return config


def resolve(config: dict, args: TrainingArguments, world_size: int, source: str) -> dict:
    """A copy of the configuration with every "auto" replaced by what the flags say, and
    "overlap_comm" off where a process is alone.

    Accelerate could fill most of them too, but not all, and clips at 1.0 whatever the script asked.

    Args:
        config: contents of the file.
        args: the flags.
        world_size: number of processes.
        source: the file's name, for messages.

    Raises UsageError: a number in the file contradicts a flag, an "auto" that nothing fills, or a
    field that this script decides.
    """
    config = json.loads(json.dumps(config))
    if "scheduler" in config:
        raise UsageError(f'{source}: remove "scheduler", the learning rate follows --lr_schedule')
    stage = config["zero_optimization"].get("stage")
    if stage not in ZERO_STAGES:
        raise UsageError(f'{source}: "zero_optimization.stage" must be 1 or 2, not {stage!r}')
    wanted = {
        "train_micro_batch_size_per_gpu": ("--batch_size", args.batch_size),
        "gradient_accumulation_steps": ("--accumulation_steps", args.accumulation_steps),
        "train_batch_size": (
            "--batch_size × --accumulation_steps × processes",
            args.batch_size * args.accumulation_steps * world_size,
        ),
        "gradient_clipping": ("--grad_clip", args.grad_clip),
        "bf16.enabled": ("--dtype " + args.dtype, args.dtype == "bfloat16"),
        "fp16.enabled": ("--dtype " + args.dtype, args.dtype == "float16"),
    }
    if "optimizer" in config:
        wanted |= _wanted_optimizer(config, args, source)
    for key, (flag, value) in wanted.items():
        section, name = _section(config, key, source)
        given = section.setdefault(name, value)
        if given == "auto":
            section[name] = value
        elif given != value:
            raise UsageError(
                f'{source} says "{key}": {json.dumps(given)}, '
                f"but {flag} gives {json.dumps(value)}: "
                'write "auto" in the file, or make them equal'
            )
    for key, value in AUTO_DEFAULTS.items():
        section, name = _section(config, key, source)
        if section.get(name) == "auto":
            section[name] = value
    if world_size == 1:  # nothing to overlap with: it would only wait for the GPU
        config["zero_optimization"]["overlap_comm"] = False
    if config.get("bf16", {}).get("check_grad_overflow") is False:
        raise UsageError(f'{source}: "check_grad_overflow": false would let NaN into the weights')
    for key in _autos(config):
        raise UsageError(
            f'{source}: "{key}": "auto" is nothing this script can fill in, write a value'
        )
    _check_zero_section(config["zero_optimization"], source)
    # It would wait for the GPU at every forward pass; the log measures throughput itself.
    config.setdefault("timers", {}).setdefault("throughput", {"enabled": False})
    if args.optimizer == "muon":
        _leave_to_muon(config, source)
    _require_compiler(config, source)
    return config


def _wanted_optimizer(config: dict, args: TrainingArguments, source: str) -> dict:
    """What AdamW's section must say. --optimizer muon takes its AdamW's numbers from the same."""
    optimizer, _ = _section(config, "optimizer.type", source)
    if optimizer.setdefault("type", "AdamW") not in OPTIMIZERS:
        raise UsageError(
            f"{source}: the optimizer must be Adam or AdamW, or not stand there; "
            "Muon is --optimizer muon"
        )
    return {
        "optimizer.params.lr": ("--learning_rate", args.learning_rate),
        "optimizer.params.weight_decay": ("--weight_decay", args.weight_decay),
        "optimizer.params.betas": ("--beta1 --beta2", [args.beta1, args.beta2]),
        "optimizer.params.eps": ("this script", ADAM_EPS),
    }


def _leave_to_muon(config: dict, source: str) -> None:
    """Have DeepSpeed take the optimizer that this script makes."""
    zero = config["zero_optimization"]
    offload = (zero.get("offload_optimizer") or {}).get("device", "none")
    if offload != "none" or zero.get("cpu_offload"):
        raise UsageError(
            f'{source}: --optimizer muon cannot be offloaded: remove "offload_optimizer", or train '
            "with --optimizer adamw"
        )
    config.pop("optimizer", None)
    config["zero_allow_untested_optimizer"] = True


def _check_zero_section(section: dict, source: str) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # seconds to import

    try:
        DeepSpeedZeroConfig(**section)
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f'DeepSpeed rejects "zero_optimization" in {source}: {reason}') from error


def _section(config: dict, key: str, source: str) -> tuple[dict, str]:
    *parents, name = key.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
        if not isinstance(config, dict):
            raise UsageError(f'{source}: "{parent}" must be a section in braces')
    return config, name


def _autos(config: dict, prefix: str = ""):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == "auto":
            yield prefix + key


def _require_compiler(config: dict, source: str) -> None:
    """DeepSpeed compiles its own Adam at first use; with no compiler it ends in a traceback."""
    optimizer = config.get("optimizer")
    if optimizer is None or optimizer["params"].get("torch_adam"):
        return
    tools = ["ninja", "nvcc"] if torch.cuda.is_available() else ["ninja", "c++"]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise UsageError(
            f"{source} asks for DeepSpeed's own {optimizer['type']}, compiled with "
            f"{' and '.join(missing)}, "
            'not found here: write "torch_adam": true under "optimizer", "params" to use PyTorch\'s'
        )
