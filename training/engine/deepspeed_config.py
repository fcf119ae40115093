"""DeepSpeed's JSON file and the flags, made one: flags fill "auto", a contradiction is an error."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from common.errors import UsageError
from training.arguments import TrainingArguments
from training.engine.deepspeed_keys import settle_keys
from training.engine.deepspeed_schedule import take_schedule

# "auto" in "zero_optimization" that no flag fills. Buckets as in ds_config.json, in elements; whole
# weights are gathered by this script's own checkpoints.
AUTO_DEFAULTS = {
    "overlap_comm": True,
    "allgather_bucket_size": 50_000_000,
    "stage3_gather_16bit_weights_on_model_save": False,
}
# In elements, by the model's width: as the Hugging Face Trainer fills them
# (transformers/integrations/deepspeed.py).
BY_WIDTH = {
    "reduce_bucket_size": lambda dim: dim * dim,
    "stage3_prefetch_bucket_size": lambda dim: int(0.9 * dim * dim),
    "stage3_param_persistence_threshold": lambda dim: 10 * dim,
}
ADAM_EPS = 1e-8
# AdamW by its names in DeepSpeed's files. It compiles its own at first use, unless "torch_adam" is
# true.
OPTIMIZERS = ("Adam", "AdamW")
ZERO_STAGES = (1, 2, 3)  # training/engine/state.py can put their state together


def read_config(path: str) -> dict:
    """Return the contents of a DeepSpeed file; "none" takes the flags of Accelerate's launcher.

    Raises UsageError: not there, not JSON, or without "zero_optimization".
    """
    if path == "none":
        from accelerate.utils import DeepSpeedPlugin  # seconds to import

        return DeepSpeedPlugin().deepspeed_config
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"DeepSpeed configuration {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"DeepSpeed configuration {path}: not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        raise UsageError(f'DeepSpeed configuration {path}: needs a "zero_optimization" section')
    return config


def file_of(args: TrainingArguments) -> str:
    """Return the path of the DeepSpeed file in use; "none" takes the launcher's own flags."""
    return args.deepspeed or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")


def resolve(config: dict, args: TrainingArguments, world_size: int, source: str) -> dict:
    """Return a copy of the configuration with every "auto" replaced by what the flags say.

    `fill_by_width` fills the others. A process that is alone has no "overlap_comm". Accelerate
    could fill most values too, but not all, and clips at 1.0 whatever the script asked. The
    "scheduler" is left out: `take_schedule` follows it.

    Args:
        config: contents of the file.
        world_size: number of processes.
        source: the file's name, for messages.

    Raises UsageError: numbers in the file contradict the flags, an "auto" that nothing fills, or
    keys that do nothing; lists all of them.
    """
    config = json.loads(json.dumps(config))
    zero = config["zero_optimization"]
    if zero.get("stage") not in ZERO_STAGES:
        raise UsageError(f'{source}: "zero_optimization.stage" must be 1, 2 or 3')
    problems = settle_keys(config)
    take_schedule(config, args, source)
    config.pop("scheduler", None)
    wanted = {
        "train_micro_batch_size_per_gpu": ("--batch_size", args.batch_size),
        "gradient_accumulation_steps": ("--accumulation_steps", args.accumulation_steps),
        "train_batch_size": (
            "--batch_size × --accumulation_steps × processes",
            args.global_batch(world_size),
        ),
        "gradient_clipping": ("--grad_clip", args.grad_clip),
        "bf16.enabled": (f"--dtype {args.dtype}", args.dtype == "bfloat16"),
        "fp16.enabled": (f"--dtype {args.dtype}", args.dtype == "float16"),
    }
    if "optimizer" in config:
        section, _ = _section(config, "optimizer.type", source)
        if section.setdefault("type", "AdamW") not in OPTIMIZERS:
            problems.append(f"the optimizer must be {' or '.join(OPTIMIZERS)}, or not stand there")
        wanted |= {
            "optimizer.params.lr": ("--learning_rate", args.learning_rate),
            "optimizer.params.weight_decay": ("--weight_decay", args.weight_decay),
            "optimizer.params.betas": ("--beta1 --beta2", [args.beta1, args.beta2]),
            "optimizer.params.eps": ("this script", ADAM_EPS),
        }
    for key, (flag, value) in wanted.items():
        section, name = _section(config, key, source)
        given = section.setdefault(name, value)
        if given == "auto":
            section[name] = value
        elif given != value:
            problems.append(f'"{key}" is {json.dumps(given)}, but {flag} gives {json.dumps(value)}')
    zero |= {key: value for key, value in AUTO_DEFAULTS.items() if zero.get(key) == "auto"}
    if world_size == 1:  # nothing to overlap with: it would only wait for the GPU
        zero["overlap_comm"] = False
    if config["bf16"].get("check_grad_overflow") is False:
        problems.append('"check_grad_overflow": false would let NaN into the weights')
    problems += [
        f'"{key}": "auto" is nothing this script can fill in, write a value'
        for key in _autos(config)
        if key.removeprefix("zero_optimization.") not in BY_WIDTH
    ]
    if args.optimizer == "muon":
        problems += _leave_to_muon(config)
    if problems:
        raise UsageError(f'{source}: {"; ".join(problems)} ("auto" takes the flag\'s value)')
    check_by_deepspeed(config, source)
    if None in nvme_folders(config):
        raise UsageError(f'{source}: "device": "nvme" needs "nvme_path", a folder')
    # It would wait for the GPU at every forward pass; the log measures throughput itself.
    config.setdefault("timers", {}).setdefault("throughput", {"enabled": False})
    if offload_device(config, "optimizer") and not all(map(shutil.which, ("ninja", "c++"))):
        # PyTorch's AdamW takes the place of DeepSpeed's for the CPU; the start block says so.
        config["zero_force_ds_cpu_optimizer"] = False
        if "optimizer" in config:
            config["optimizer"]["params"] |= {"torch_adam": True, "fused": True}
    return config


def fill_by_width(config: dict, dim: int) -> None:
    """Replace each "auto" that the width of the model decides."""
    zero = config["zero_optimization"]
    zero |= {key: fill(dim) for key, fill in BY_WIDTH.items() if zero.get(key) == "auto"}


def offload_device(config: dict | None, what: str) -> str | None:
    """Return where a configuration moves the "optimizer" or "param": "cpu", "nvme" or None."""
    zero = config["zero_optimization"] if config else {}
    device = (zero.get(f"offload_{what}") or {}).get("device", "none")
    return None if device == "none" else device


def nvme_folders(config: dict) -> set[str | None]:
    """Return where a configuration keeps files instead of tensors; None is a name left out."""
    zero = config["zero_optimization"]
    on_nvme = [what for what in ("optimizer", "param") if offload_device(config, what) == "nvme"]
    return {zero[f"offload_{what}"].get("nvme_path") for what in on_nvme}


def _leave_to_muon(config: dict) -> Iterator[str]:
    """Have DeepSpeed take the optimizer that this script makes; yield why it cannot."""
    if config["zero_optimization"]["stage"] == 3:
        yield (
            "--optimizer muon steps whole matrices, which no process has under ZeRO-3: take "
            '"stage": 2, or --optimizer adamw'
        )
    if offload_device(config, "optimizer"):
        yield '--optimizer muon cannot be offloaded: remove "offload_optimizer"'
    config.pop("optimizer", None)
    config["zero_allow_untested_optimizer"] = True


def check_by_deepspeed(config: dict, source: str) -> None:
    """Raise UsageError for what DeepSpeed would refuse at its start, below a traceback."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError  # seconds to import

    # It cannot know yet how many processes there are.
    config = json.loads(json.dumps(config | {"train_batch_size": None}))
    try:
        DeepSpeedConfig(config)
    except (ValueError, TypeError, AttributeError, AssertionError, DeepSpeedConfigError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"DeepSpeed rejects {source}: {reason}") from error


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
