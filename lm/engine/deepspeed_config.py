"""Merge DeepSpeed's JSON file and the training flags into one configuration."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hjson  # DeepSpeed requires it

from lm.common.errors import UsageError, reason

# Keys of "zero_optimization" for which "auto" means DeepSpeed's default, beside "stage3_...".
BY_DEFAULT = ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "sub_group_size")
# The key of "zero_optimization" whose "auto" `Engine.fit_to` replaces.
BY_WIDTH = "stage3_param_persistence_threshold"
ADAM_EPS = 1e-8
# Old names, which guides still print → today's names.
OLD_NAMES = {
    "bfloat16": "bf16",
    "aio.thread_count": "aio.intra_op_parallelism",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "zero_optimization."
    "stage3_gather_16bit_weights_on_model_save",
}
# The next two tables: prefix of a section → keys of this section, separated by spaces.
# KNOWN has all accepted keys of the listed sections; other keys are refused unless they are
# switched off. DeepSpeed checks the other sections.
KNOWN = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
    "gradient_clipping gradient_allreduce_op gradient_predivide_factor prescale_gradients "
    "communication_data_type data_types bf16 fp16 zero_optimization zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer aio optimizer steps_per_print wall_clock_breakdown "
    "memory_breakdown dump_state disable_python_gc log_level timers flops_profiler comms_logger "
    "tensorboard wandb csv_monitor comet",
    "aio.": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "flops_profiler.": "enabled recompute_fwd_factor profile_step module_depth top_modules "
    "detailed output_file",
    "data_types.": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "optimizer.": "type params legacy_fusion",
    "optimizer.params.": "lr betas eps weight_decay torch_adam fused adam_w_mode bias_correction",
    "timers.": "throughput",
}
# Keys of other sections that are refused unless they are switched off: old names that Accelerate
# does not read, keys that lower the precision, keys with state that checkpoints miss.
REFUSED = {
    "bf16.": "bf16_master_weights_and_grads bf16_optimizer_states",
    "fp16.": "fp16_master_weights_and_grads",
    "zero_optimization.": "legacy_stage1 zenflow zero_quantized_weights zero_quantized_gradients "
    "zero_quantized_nontrainable_weights cpu_offload cpu_offload_param cpu_offload_use_pin_memory",
    "zero_optimization.offload_optimizer.": "super_offload",
}
# Prefixes of all sections whose keys are read here, each after the section in which it is.
SECTIONS = (*KNOWN, *REFUSED, "bfloat16.", "scheduler.", "scheduler.params.")
SECTIONS += ("zero_optimization.offload_param.",)
# DeepSpeed's schedules (deepspeed/runtime/lr_schedules.py) → --lr_schedule.
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
# Parameters of schedules that become flags, or have no effect here.
FOLLOWED = ("warmup_num_steps", "warmup_max_lr", "total_num_steps", "cos_min_ratio", "warmup_type")
# Parameters of schedules → the values that change nothing: the warm-up begins at 0.
AT_ZERO = (0, "auto")
NEUTRAL = {"warmup_min_lr": AT_ZERO, "warmup_min_ratio": AT_ZERO, "last_batch_iteration": (-1,)}


def read_config(path: str) -> dict:
    """Return the contents of the DeepSpeed file `path`, with today's names of keys.
    If `path` is "none", return the configuration from the flags of `accelerate launch`.
    Raises UsageError if the file cannot be read, or is not a DeepSpeed configuration."""
    config = read_file(path)
    rename_old_keys(config, path)
    return config


def read_file(path: str) -> dict:
    """Return a file's contents as they are. DeepSpeed reads its files with hjson too, which allows
    comments and trailing commas. Here null means that the key is missing. See `read_config` for
    "none" and errors."""
    if path == "none":
        from accelerate.utils import DeepSpeedPlugin  # importing it takes seconds

        return DeepSpeedPlugin().deepspeed_config

    def as_section(pairs: list[tuple]) -> dict:
        if twice := [key for n, (key, _) in enumerate(pairs) if key in dict(pairs[:n])]:
            raise UsageError(f'DeepSpeed file {path}: keep only one "{twice[0]}"')
        return {key: value for key, value in pairs if value is not None}

    try:
        text = Path(path).read_text(encoding="utf-8")
        config = hjson.loads(text, object_pairs_hook=as_section)
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"DeepSpeed file {path}: no readable JSON ({reason(error)})") from error
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        raise UsageError(f'DeepSpeed configuration {path}: needs a "zero_optimization" section')
    for prefix in SECTIONS:
        if not isinstance(value := section_of(config, prefix), dict):
            said = f'"{prefix[:-1]}" must be a section in braces, not {json.dumps(value)}'
            raise UsageError(f"{path}: {said}")
    return config


def rename_old_keys(config: dict, source: str) -> list[str]:
    """Replace OLD_NAMES; return a sentence for each. Raises UsageError if a key has both names."""
    said = []
    for old, new in OLD_NAMES.items():
        (prefix, _, old_name), new_name = old.rpartition("."), new.rpartition(".")[2]
        section = section_of(config, prefix and f"{prefix}.")
        if old_name in section:
            value = section.pop(old_name)
            if section.setdefault(new_name, value) != value:
                raise UsageError(f'{source}: "{old_name}" is the old name of "{new_name}": drop it')
            said.append(f'"{old_name}" is read as "{new_name}"')
    return said


def file_of(typed: str | None) -> str:
    """Return the path of the DeepSpeed file in use, --deepspeed or the launcher's, or "none"."""
    launched = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    named = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") if launched else "none"
    return typed or named


def resolve(config: dict, args, world_size: int, source: str) -> dict:
    """Return a copy of the configuration in which the flags replace "auto". BY_WIDTH keeps "auto".
    The copy has no "scheduler": the flags hold it. `source` names the configuration in messages.
    Raises UsageError with a list of all contradictions, keys without effect and other problems."""
    config = json.loads(json.dumps(config))  # a copy
    config.pop("scheduler", None)  # see `schedule_flags`
    problems = [*_fill_by_flags(config, args, world_size), *problems_of(config)]
    if args.optimizer == "muon":
        problems += _use_muon(config)
    if problems:
        raise UsageError(f'{source}: {"; ".join(problems)} ("auto" takes the flag\'s value)')
    if world_size == 1:  # nothing to overlap; "overlap_comm" would make DeepSpeed wait for the GPU
        config["zero_optimization"]["overlap_comm"] = False
    # DeepSpeed's throughput timer would wait for the GPU at every forward pass.
    config.setdefault("timers", {}).setdefault("throughput", {"enabled": False})
    has_compiler = shutil.which("ninja") and shutil.which("c++")
    if offload_device(config, "optimizer") and not has_compiler:
        config["zero_force_ds_cpu_optimizer"] = False  # PyTorch's AdamW runs on the CPU
        if "optimizer" in config:
            config["optimizer"]["params"] |= {"torch_adam": True, "fused": True}
    return config


def problems_of(config: dict) -> Iterator[str]:
    """Yield a message for every problem of a configuration; delete unsupported keys."""
    yield from _refuse_keys(config)
    yield from _check_stage(config)
    yield from _refusals_of_deepspeed(config)


def _refuse_keys(config: dict, prefix: str = "") -> Iterator[str]:
    """Delete the unsupported keys of a section and of the sections in it. Yield a message for each
    of them, unless it is switched off, and for each "auto"."""
    refused, known = REFUSED.get(prefix, "").split(), KNOWN.get(prefix)
    for key, value in sorted(config.items()):
        if key in refused or (known and key not in known.split()):
            del config[key]
            if not _is_off(value):
                yield f'remove "{prefix}{key}": not supported here (docs/engines.md)'
        elif isinstance(value, dict):
            yield from _refuse_keys(value, f"{prefix}{key}.")
        elif value == "auto" and key != BY_WIDTH:
            yield f'"{prefix}{key}": "auto" is not replaced by a flag here, write a value'


def section_of(config: dict, prefix: str) -> dict:
    """Return the section of a prefix such as "fp16.", {} if missing; "" is the whole file."""
    for name in prefix.split(".")[:-1]:
        config = config.get(name, {})
    return config


def _is_off(value) -> bool:
    """Return whether the value switches a feature off, or is missing (None)."""
    if isinstance(value, dict):
        off = value.get("enabled") is False or value.get("device") == "none"
        return off or all(map(_is_off, value.values()))
    return value is None or value is False


def _check_stage(config: dict) -> Iterator[str]:
    """Yield a message for every problem with the stage of ZeRO, offloading or NVMe folders."""
    zero = config["zero_optimization"]
    stage = zero.get("stage")
    parameters, optimizer = (offload_device(config, what) for what in ("param", "optimizer"))
    if stage not in (1, 2, 3):
        no_file = "leave out the file, or set ENGINE=ddp" if stage == 0 else "not " + repr(stage)
        yield f'"zero_optimization.stage" must be 1, 2 or 3: {no_file}'
    if None in nvme_folders(config):
        yield '"device": "nvme" needs "nvme_path", a folder'
    if section_of(config, "zero_optimization.offload_optimizer.").get("ratio", 1) != 1:
        yield 'remove "ratio" of "offload_optimizer": checkpoints would miss optimizer state'
    if stage == 3 and parameters == "nvme" and zero.get("stage3_max_reuse_distance", 1):
        yield 'parameters on NVMe need "stage3_max_reuse_distance": 0'
    if stage in (1, 2) and parameters:
        yield f'remove "offload_param": it does nothing at stage {stage}, only at 3'
    if stage in (1, 2) and optimizer == "nvme":
        yield f'"offload_optimizer" at stage {stage} takes no "nvme": write "cpu", or use stage 3'


def _fill_by_flags(config: dict, args, world_size: int) -> Iterator[str]:
    """Fill "auto" and missing values from the flags; yield a message for every problem.
    Accelerate would leave some values out, and clip gradients at 1.0 whatever the flags say."""
    batch = "--batch_size × --accumulation_steps × processes"
    wanted = {  # key → (where its value comes from, value)
        "train_micro_batch_size_per_gpu": ("--batch_size", args.batch_size),
        "gradient_accumulation_steps": ("--accumulation_steps", args.accumulation_steps),
        "train_batch_size": (batch, args.global_batch(world_size)),
        "gradient_clipping": ("--grad_clip", args.grad_clip),
        "bf16.enabled": (f"--dtype {args.dtype}", args.dtype == "bfloat16"),
        "fp16.enabled": (f"--dtype {args.dtype}", args.dtype == "float16"),
    }
    if "optimizer" in config:  # DeepSpeed has two names for AdamW
        if config["optimizer"].setdefault("type", "AdamW") not in ("Adam", "AdamW"):
            yield 'the optimizer must be Adam or AdamW; or remove "optimizer"'
        if config["optimizer"].get("params", {}).get("adam_w_mode") is False:
            yield 'remove "adam_w_mode": false, which is not the weight decay of AdamW'
        wanted |= {
            "optimizer.params.lr": ("--learning_rate", args.learning_rate),
            "optimizer.params.weight_decay": ("--weight_decay", args.weight_decay),
            "optimizer.params.betas": ("--beta1 --beta2", [args.beta1, args.beta2]),
            "optimizer.params.eps": ("this script", ADAM_EPS),
        }
    for key, (flag, value) in wanted.items():
        *parents, name = key.split(".")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        given, section[name] = section.get(name, "auto"), value
        if given not in ("auto", value):
            yield f'"{key}" is {json.dumps(given)}, but {flag} gives {json.dumps(value)}'
    if config["bf16"].get("check_grad_overflow") is False:
        yield 'remove "check_grad_overflow": false, it would let NaN into the weights'
    zero = config["zero_optimization"]
    for key in [key for key in zero if zero[key] == "auto" and key != BY_WIDTH]:
        if key in BY_DEFAULT or key.startswith("stage3_"):
            del zero[key]


def flags_of_config(config: dict, source: str) -> dict[str, Any]:
    """Return the training flags that a DeepSpeed configuration decides: the schedule of the rate,
    and --dtype if it switches a precision on. Raises UsageError as `schedule_flags` does."""
    flags = schedule_flags(config, source)
    for section, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if section_of(config, f"{section}.").get("enabled") is True:
            return flags | {"dtype": dtype}
    return flags


def schedule_flags(config: dict, source: str) -> dict[str, Any]:
    """Return the flags that mean the same as a configuration's "scheduler". DeepSpeed's defaults
    count for missing parameters. Raises UsageError if there are no such flags."""
    section = config.get("scheduler")
    if section is None:
        return {}
    theirs, params = section.get("type"), section.get("params", {})
    if theirs not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise UsageError(
            f'{source}: "scheduler" must be one of {known}, not {theirs!r}; or drop it'
        )
    if others := section.keys() - {"type", "params"}:
        raise UsageError(f'{source}: drop "scheduler.{min(others)}": DeepSpeed does not read it')
    for key, value in params.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        follows = key in FOLLOWED and (is_number or value == "auto" or key == "warmup_type")
        if not follows and value not in NEUTRAL.get(key, ()):
            raise UsageError(f'{source}: drop "scheduler.params.{key}": it cannot be followed here')
    decays = theirs == "WarmupDecayLR"
    rate = section_of(config, "optimizer.params.").get("lr", "auto")  # the optimizer's own
    flags = {
        "lr_schedule": SCHEDULES[theirs],
        "warmup_steps": params.get("warmup_num_steps", 1000),
    }
    flags["learning_rate"] = params.get("warmup_max_lr", 1e-3 if decays else rate)
    if theirs != "WarmupLR":
        flags["max_steps"] = params.get("total_num_steps", "auto")
        flags["min_lr_ratio"] = 0.0 if decays else params.get("cos_min_ratio", 1e-4)
    flags = {name: value for name, value in flags.items() if value not in ("auto", None)}
    for name in ("warmup_steps", "max_steps"):
        if flags.get(name, 0) % 1:
            raise UsageError(f'{source}: "scheduler" has {flags[name]} steps, not a whole number')
        flags |= {name: int(flags[name])} if name in flags else {}  # 1e3 is a float in JSON
    return flags


def offload_device(config: dict, what: str) -> str | None:
    """Return where `what` ("optimizer" or "param") is offloaded to: "cpu", "nvme" or None."""
    device = section_of(config, f"zero_optimization.offload_{what}.").get("device", "none")
    return None if device == "none" else device


def nvme_folders(config: dict) -> set[str | None]:
    """Return the folders for tensors on NVMe. None is in the set if a path is missing."""
    zero = config["zero_optimization"]
    on_nvme = [what for what in ("optimizer", "param") if offload_device(config, what) == "nvme"]
    return {zero[f"offload_{what}"].get("nvme_path") for what in on_nvme}


def _refusals_of_deepspeed(config: dict) -> Iterator[str]:
    """Yield a one-line message if DeepSpeed rejects the configuration."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    # DeepSpeed would check the global batch, but does not know the number of processes yet.
    config = json.loads(json.dumps(config | {"train_batch_size": None}))
    try:
        DeepSpeedConfig(config)
    except (ValueError, TypeError, AttributeError, AssertionError, DeepSpeedConfigError) as error:
        yield f"DeepSpeed rejects the file: {' '.join(str(error).split())}"


def _use_muon(config: dict) -> Iterator[str]:
    """Make DeepSpeed accept our Muon; yield a message for each setting that prevents this."""
    if config["zero_optimization"].get("stage") == 3:
        yield '--optimizer muon updates whole matrices: use "stage": 2, or --optimizer adamw'
    if offload_device(config, "optimizer"):
        yield '--optimizer muon cannot be offloaded: remove "offload_optimizer"'
    config.pop("optimizer", None)
    config["zero_allow_untested_optimizer"] = True
