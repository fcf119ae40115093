"""DeepSpeed's JSON file and the flags, made one.

Flags fill "auto". A contradiction, or a key that would be ignored, is an error.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path

from common.errors import UsageError
from training.arguments import TrainingArguments

# "auto" in "zero_optimization" that no flag fills: as in ds_config.json.
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
# By section; DeepSpeed itself checks the others.
KNOWN = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
    "gradient_clipping gradient_allreduce_op gradient_predivide_factor prescale_gradients "
    "communication_data_type data_types bf16 fp16 zero_optimization zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer aio optimizer scheduler steps_per_print wall_clock_breakdown "
    "memory_breakdown dump_state disable_python_gc log_level timers flops_profiler comms_logger "
    "tensorboard wandb csv_monitor comet",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "optimizer": "type params legacy_fusion",
    "timers": "throughput",
}
# Keys without effect here, or whose state checkpoints would miss (docs/engines.md).
# They are dropped where they are switched off.
REFUSED = [
    *("activation_checkpointing", "autotuning", "checkpoint", "compile", "data_efficiency"),
    *("dataloader_drop_last", "hybrid_engine", "pipeline", "sequence_parallel_size"),
    *("tensor_parallel", "torch_autocast", "weight_quantization"),
    *("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
    *("fp16.fp16_master_weights_and_grads", "zero_optimization.legacy_stage1"),
    *("zero_optimization.zenflow", "zero_optimization.offload_optimizer.super_offload"),
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_gradients",
    # Old names, which Accelerate does not read.
    *("bfloat16", "zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param"),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
]
# Keys of "zero_optimization" that need stage 3, besides stage3_...
OF_STAGE_3 = [
    *("leaf_module", "memory_efficient_linear", "offload_param", "override_module_apply"),
    *("sub_group_size", "zero_hpz_partition_size"),
]
# deepspeed/runtime/lr_schedules.py, by our own names. DeepSpeed's curve is two steps behind.
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
FOLLOWED = ("warmup_num_steps", "warmup_max_lr", "total_num_steps", "cos_min_ratio")
# Parameters that may stand there; the warm-up begins at 0 here, in a straight line.
AT_0 = ("warmup_min_lr", "warmup_min_ratio")
WITHOUT_EFFECT = ("warmup_type", "last_batch_iteration")


def read_config(path: str) -> dict:
    """Return a DeepSpeed file's contents; "none": of the flags of Accelerate's launcher.
    Raises UsageError: this is no such file."""
    if path == "none":
        from accelerate.utils import DeepSpeedPlugin  # seconds to import

        return DeepSpeedPlugin().deepspeed_config
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"DeepSpeed configuration {path} (not JSON?): {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        raise UsageError(f'DeepSpeed configuration {path}: needs a "zero_optimization" section')
    return config


def file_of(args: TrainingArguments) -> str:
    """Return the path of the DeepSpeed file in use, "none" without a file."""
    return args.deepspeed or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")


def resolve(config: dict, args: TrainingArguments, world_size: int, source: str) -> dict:
    """Return a copy of the configuration, filled by the flags, without "scheduler".

    `fill_by_width` fills each "auto" that is left.
    Raises UsageError: lists all that contradicts, is ignored, or cannot be filled.
    """
    config = json.loads(json.dumps(config))
    zero = config["zero_optimization"]
    if zero.get("stage") not in (1, 2, 3):
        raise UsageError(f'{source}: "zero_optimization.stage" must be 1, 2 or 3')
    problems = refuse_keys(config)
    take_schedule(config, args, source)
    config.pop("scheduler", None)
    problems += _fill_by_flags(config, args, world_size)
    if args.optimizer == "muon":
        problems += _leave_to_muon(config)
    if problems:
        raise UsageError(f'{source}: {"; ".join(problems)} ("auto" takes the flag\'s value)')
    check_by_deepspeed(config, source)
    if None in nvme_folders(config):
        raise UsageError(f'{source}: "device": "nvme" needs "nvme_path", a folder')
    if world_size == 1:  # nothing to overlap with: it would only wait for the GPU
        zero["overlap_comm"] = False
    # It would wait for the GPU at every forward pass.
    config.setdefault("timers", {}).setdefault("throughput", {"enabled": False})
    if offload_device(config, "optimizer") and not all(map(shutil.which, ("ninja", "c++"))):
        # PyTorch's AdamW for the CPU instead; the start block says so.
        config["zero_force_ds_cpu_optimizer"] = False
        if "optimizer" in config:
            config["optimizer"]["params"] |= {"torch_adam": True, "fused": True}
    return config


def refuse_keys(config: dict) -> list[str]:
    """Drop keys that are switched off; return the problems of the others."""
    problems, aio = [], config.get("aio") or {}
    if "thread_count" in aio:  # as the guides call it still
        aio.setdefault("intra_op_parallelism", aio.pop("thread_count"))
    for path in REFUSED:
        *parents, name = path.split(".")
        section = reduce(lambda found, key: found.get(key) or {}, parents, config)
        if not _is_off(section.pop(name, None)):
            problems.append(f'remove "{path}": this script does not follow it (docs/engines.md)')
    problems += _check_stage(config["zero_optimization"])
    for name, known in KNOWN.items():
        section, prefix = (config.get(name) or {}, f"{name}.") if name else (config, "")
        unknown = [key for key in section if key not in known.split()]
        problems += [f'"{prefix}{key}" does nothing here: remove it' for key in unknown]
    return problems


def _is_off(value) -> bool:
    if isinstance(value, dict):
        off = value.get("enabled") is False or value.get("device") == "none"
        return off or all(map(_is_off, value.values()))
    return value is None or value is False


def _check_stage(zero: dict) -> Iterator[str]:
    """Yield what DeepSpeed would ignore without a word."""
    stage, offload = zero["stage"], zero.get("offload_optimizer") or {}
    if offload.get("ratio", 1) != 1:
        yield 'remove "ratio" of "offload_optimizer": checkpoints would miss some of its state'
    if stage == 3:
        on_nvme = (zero.get("offload_param") or {}).get("device") == "nvme"
        if on_nvme and zero.get("stage3_max_reuse_distance", 1):
            yield 'parameters on NVMe need "stage3_max_reuse_distance": 0'
        return
    for key, value in zero.items():
        if (key.startswith("stage3_") or key in OF_STAGE_3) and not _is_off(value):
            yield f'remove "zero_optimization.{key}": it does nothing at stage {stage}, only at 3'
    if offload.get("device") == "nvme":
        yield f'"offload_optimizer" at stage {stage} takes no "nvme": write "cpu", or take stage 3'


def _fill_by_flags(config: dict, args: TrainingArguments, world_size: int) -> list[str]:
    """Fill "auto" and what is missing; return what contradicts or cannot be filled.
    (Accelerate fills not all values, and clips at 1.0 whatever the script asked.)"""
    problems = []
    batch = "--batch_size × --accumulation_steps × processes"
    wanted = {
        "train_micro_batch_size_per_gpu": ("--batch_size", args.batch_size),
        "gradient_accumulation_steps": ("--accumulation_steps", args.accumulation_steps),
        "train_batch_size": (batch, args.global_batch(world_size)),
        "gradient_clipping": ("--grad_clip", args.grad_clip),
        "bf16.enabled": (f"--dtype {args.dtype}", args.dtype == "bfloat16"),
        "fp16.enabled": (f"--dtype {args.dtype}", args.dtype == "float16"),
    }
    if "optimizer" in config:
        # AdamW by its names in DeepSpeed's files.
        if config["optimizer"].setdefault("type", "AdamW") not in ("Adam", "AdamW"):
            problems.append("the optimizer must be Adam or AdamW, or not stand there")
        wanted |= {
            "optimizer.params.lr": ("--learning_rate", args.learning_rate),
            "optimizer.params.weight_decay": ("--weight_decay", args.weight_decay),
            "optimizer.params.betas": ("--beta1 --beta2", [args.beta1, args.beta2]),
            "optimizer.params.eps": ("this script", ADAM_EPS),
        }
    for key, (flag, value) in wanted.items():
        *parents, name = key.split(".")
        section = reduce(lambda found, parent: found.setdefault(parent, {}), parents, config)
        given = section.setdefault(name, value)
        if given == "auto":
            section[name] = value
        elif given != value:
            problems.append(f'"{key}" is {json.dumps(given)}, but {flag} gives {json.dumps(value)}')
    zero = config["zero_optimization"]
    zero |= {key: value for key, value in AUTO_DEFAULTS.items() if zero.get(key) == "auto"}
    if config["bf16"].get("check_grad_overflow") is False:
        problems.append('"check_grad_overflow": false would let NaN into the weights')
    return problems + [
        f'"{key}": "auto" is nothing this script can fill in, write a value'
        for key in _autos(config)
        if key.removeprefix("zero_optimization.") not in BY_WIDTH
    ]


def take_schedule(
    config: dict | None, args: TrainingArguments, source: str = "the DeepSpeed file"
) -> tuple[TrainingArguments, str | None]:
    """Return the arguments with the schedule of a file, and a sentence that says so.

    Without a scheduler the default is a cosine, and there is no sentence.
    Raises UsageError: a flag contradicts the file, or its curve is another one.
    """
    section = (config or {}).get("scheduler")
    if section is None:
        return replace(args, lr_schedule=args.lr_schedule or "cosine"), None
    kind, params = section.get("type"), section.get("params", {})
    if kind not in SCHEDULES:
        raise UsageError(f'{source}: "scheduler" must be {" or ".join(SCHEDULES)}, not {kind!r}')
    problems = [
        f'remove "scheduler.params.{key}": it is not followed here, the warm-up begins at 0'
        for key, value in params.items()
        if key not in (*FOLLOWED, *WITHOUT_EFFECT) and not (key in AT_0 and value in (0, "auto"))
    ]
    wanted = {
        "lr_schedule": SCHEDULES[kind],
        "warmup_steps": params.get("warmup_num_steps", 1000),
        "learning_rate": params.get("warmup_max_lr", "auto"),
    }
    if kind != "WarmupLR":
        floor = params.get("cos_min_ratio", 0.0001) if kind == "WarmupCosineLR" else 0
        wanted |= {"max_steps": params.get("total_num_steps", "auto"), "min_lr_ratio": floor}
    values = {"lr_schedule": SCHEDULES[kind]}
    for flag, value in wanted.items():
        typed = getattr(args, flag)
        default = TrainingArguments.min_lr_ratio if flag == "min_lr_ratio" else None
        if typed == default and value != "auto":
            values[flag] = value
        elif value not in ("auto", typed):
            problems.append(f'"scheduler" says --{flag} {value}, the flags say {typed}')
    if problems:
        raise UsageError(f"{source}: {'; '.join(problems)}")
    said = " ".join(f"--{flag} {value}" for flag, value in values.items())
    return replace(args, **values), f"{kind} of {source} is {said}; the warm-up is linear here"


def fill_by_width(config: dict, dim: int) -> None:
    """Replace each "auto" that the width of the model decides."""
    zero = config["zero_optimization"]
    zero |= {key: fill(dim) for key, fill in BY_WIDTH.items() if zero.get(key) == "auto"}


def offload_device(config: dict | None, what: str) -> str | None:
    """Return where the "optimizer" or "param" is moved: "cpu", "nvme" or None."""
    zero = config["zero_optimization"] if config else {}
    device = (zero.get(f"offload_{what}") or {}).get("device", "none")
    return None if device == "none" else device


def nvme_folders(config: dict) -> set[str | None]:
    """Return the folders of tensors on NVMe; None is a name left out."""
    zero = config["zero_optimization"]
    on_nvme = [what for what in ("optimizer", "param") if offload_device(config, what) == "nvme"]
    return {zero[f"offload_{what}"].get("nvme_path") for what in on_nvme}


def check_by_deepspeed(config: dict, source: str) -> None:
    """Raise UsageError for what DeepSpeed would refuse below a traceback."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    # It cannot know yet how many processes there are.
    config = json.loads(json.dumps(config | {"train_batch_size": None}))
    try:
        DeepSpeedConfig(config)
    except (ValueError, TypeError, AttributeError, AssertionError, DeepSpeedConfigError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"DeepSpeed rejects {source}: {reason}") from error


def _leave_to_muon(config: dict) -> Iterator[str]:
    """Have DeepSpeed take the optimizer that this script makes; yield why it cannot."""
    if config["zero_optimization"]["stage"] == 3:
        yield '--optimizer muon steps whole matrices: take "stage": 2, or --optimizer adamw'
    if offload_device(config, "optimizer"):
        yield '--optimizer muon cannot be offloaded: remove "offload_optimizer"'
    config.pop("optimizer", None)
    config["zero_allow_untested_optimizer"] = True


def _autos(config: dict, prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == "auto":
            yield prefix + key
