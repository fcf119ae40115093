"""The keys of DeepSpeed's JSON file, as other people write it: old names become the new ones, and
what DeepSpeed or this project would take and ignore is refused by name.

Names and defaults as DeepSpeed 0.19 reads them (deepspeed/runtime/config.py and lr_schedules.py).
"""

import difflib
import inspect

import torch

from common.errors import UsageError
from training.arguments import TrainingArguments

# What does something here. Sections that DeepSpeed checks itself have no line of their own.
KNOWN = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
    "gradient_clipping gradient_allreduce_op gradient_predivide_factor prescale_gradients "
    "communication_data_type data_types bf16 fp16 zero_optimization zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer aio optimizer steps_per_print wall_clock_breakdown "
    "memory_breakdown dump_state disable_python_gc log_level timers flops_profiler comms_logger "
    "tensorboard wandb csv_monitor comet",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed "
    "output_file",
    "optimizer": "type params legacy_fusion",
    "timers": "throughput",
}
# What DeepSpeed reads and has no use for in this project, and why.
OF_NO_USE = {
    "activation_checkpointing": "--gradient_checkpointing does it here",
    "autotuning": "it is for deepspeed --autotuning",
    "checkpoint": "this script writes its own checkpoints",
    "compile": "--compile decides",
    "data_efficiency": "this script has its own data loader",
    "dataloader_drop_last": "this script has its own data loader",
    "datastates_ckpt": "this script writes its own checkpoints",
    "disable_allgather": "DeepSpeed reads it and does nothing",
    "expert_parallel": "the model has no experts",
    "hybrid_engine": "it generates text in RLHF",
    "managed_gradient_accumulation": "--accumulation_steps decides",
    "pipeline": "the model is no deepspeed.PipelineModule",
    "seq_parallel_communication_data_type": "sequences are not split among processes",
    "sequence_parallel_size": "sequences are not split among processes",
    "tensor_parallel": "matrices are not split among processes",
    "torch_autocast": "--dtype decides",
    "use_data_before_expert_parallelism": "the model has no experts",
    "vocabulary_size": "the vocabulary comes with the data",
    "weight_quantization": "it is for inference",
}
# What DeepSpeed does and this project does not follow, by the reason.
NOT_FOLLOWED = {
    "checkpoints would miss some of its state": (
        "zero_optimization.zenflow",
        "zero_optimization.offload_optimizer.ratio",  # below 1
        "zero_optimization.offload_optimizer.super_offload",
    ),
    "what is stepped is fp32 here": (
        *("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
        "fp16.fp16_master_weights_and_grads",
    ),
    "it rounds what is sent to 8 bits or 4": (
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_quantized_nontrainable_weights",
        "zero_optimization.zero_quantized_gradients",
    ),
    "DeepSpeed has it no more": ("zero_optimization.legacy_stage1",),
}
# Besides those that begin with stage3_
OF_STAGE_3 = (
    "offload_param sub_group_size memory_efficient_linear override_module_apply leaf_module "
    "zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
    "zero_quantized_gradients"
)
# Schedules that draw the same curve, and DeepSpeed's defaults where its section is silent.
SCHEDULES = {
    "WarmupLR": ("constant", {"warmup_max_lr": "auto"}),
    "WarmupDecayLR": ("linear", {"warmup_max_lr": 0.001, "total_num_steps": "auto"}),
    "WarmupCosineLR": ("cosine", {"cos_min_ratio": 0.0001, "total_num_steps": "auto"}),
}
FLAGS = {
    "warmup_num_steps": "warmup_steps",
    "warmup_max_lr": "learning_rate",
    "cos_min_ratio": "min_lr_ratio",
    "total_num_steps": "max_steps",
}


def settle_keys(config: dict, args: TrainingArguments, source: str) -> None:
    """Bring the keys of a configuration, whose stage is known to be one, to those that act.

    Raises UsageError: a key that does nothing at this stage or in this project, or a scheduler
    section which says something else than the flags.
    """
    _rename_old(config, source)
    for key, why in OF_NO_USE.items():
        if not _is_off(config.pop(key, None)):
            raise UsageError(f'{source}: remove "{key}": {why}')
    _check_stage(config["zero_optimization"], source)
    for why, keys in NOT_FOLLOWED.items():
        for key in keys:
            value = config
            for name in key.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            if value not in ((None, 1) if name == "ratio" else (None, False)):
                raise UsageError(f'{source}: remove "{key}": {why}')
    if "scheduler" in config:
        _answer_scheduler(config.pop("scheduler"), args, source)
    for name, known in KNOWN.items():
        section = config.get(name) if name else config
        if isinstance(section, dict):
            _refuse_unknown(section, known.split(), f"{name}." if name else "", source)


def _rename_old(config: dict, source: str) -> None:
    """Where a new name says exactly the same. Accelerate reads the new ones alone."""
    zero, aio = config["zero_optimization"], config.get("aio")
    renamed = [
        (config, "bfloat16", "bf16"),
        (zero, "cpu_offload", "offload_optimizer"),
        (zero, "cpu_offload_param", "offload_param"),
        (
            zero,
            "stage3_gather_fp16_weights_on_model_save",
            "stage3_gather_16bit_weights_on_model_save",
        ),
        (aio if isinstance(aio, dict) else {}, "thread_count", "intra_op_parallelism"),
    ]
    for section, old, new in renamed:
        if old not in section:
            continue
        if new in section:
            raise UsageError(f'{source}: remove "{old}", the old name of "{new}"')
        value = section.pop(old)
        if old.startswith("cpu_offload") and isinstance(value, bool):
            value = {"device": "cpu" if value else "none"}
        section[new] = value
    if "cpu_offload_use_pin_memory" in zero:
        raise UsageError(
            f'{source}: "cpu_offload_use_pin_memory" is "pin_memory" in "offload_optimizer" or '
            '"offload_param" now'
        )


def _is_off(value) -> bool:
    """Whether it says that nothing is to be done, as DeepSpeed does without it."""
    if isinstance(value, dict):
        off = value.get("enabled") is False or value.get("device") == "none"
        return off or all(map(_is_off, value.values()))
    return value is None or value is False


def _check_stage(zero: dict, source: str) -> None:
    """What DeepSpeed ignores below stage 3."""
    if "aio" in zero:
        raise UsageError(f'{source}: move "aio" out of "zero_optimization", to the top level')
    stage = zero["stage"]
    if stage == 3:
        return
    for key, value in zero.items():
        if (key.startswith("stage3_") or key in OF_STAGE_3.split()) and not _is_off(value):
            raise UsageError(
                f'{source}: remove "zero_optimization.{key}": it does nothing at stage {stage}, '
                "only at 3"
            )
    offload = zero.get("offload_optimizer")
    if isinstance(offload, dict) and offload.get("device") == "nvme":
        raise UsageError(
            f'{source}: "offload_optimizer" at stage {stage} would go to the CPU\'s memory where '
            'it says "nvme": write "cpu", or take stage 3'
        )


def _refuse_unknown(section: dict, known: list[str], prefix: str, source: str) -> None:
    for key in section:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            guess = f'did you mean "{prefix}{close[0]}"?' if close else "remove it"
            raise UsageError(f'{source}: DeepSpeed does not know "{prefix}{key}": {guess}')


def _answer_scheduler(section, args: TrainingArguments, source: str) -> None:
    """Whether this script's schedule is the one in the file; if not, the flags that make it so.

    DeepSpeed's curve is behind by two steps: at its first two the rate is warmup_min_lr.
    """
    if not isinstance(section, dict) or not isinstance(section.get("params", {}), dict):
        raise UsageError(f'{source}: "scheduler" and its "params" must be sections in braces')
    kind = str(section.get("type"))
    if kind not in SCHEDULES:
        raise UsageError(
            f'{source}: remove "scheduler", the learning rate follows --lr_schedule: '
            f"{', '.join(f'{ours} as {theirs}' for theirs, (ours, _) in SCHEDULES.items())}"
        )
    ours, defaults = SCHEDULES[kind]
    params = {"warmup_num_steps": 1000} | defaults | section.get("params", {})
    others = ["warmup_min_lr", "warmup_min_ratio", "warmup_type"]
    _refuse_unknown(params, [*FLAGS, *others], "scheduler.params.", source)
    wanted = {"lr_schedule": ours} | ({"min_lr_ratio": 0} if ours == "linear" else {})
    wanted |= {
        flag: params[key] for key, flag in FLAGS.items() if params.get(key, "auto") != "auto"
    }
    shown = wanted if "warmup_steps" in wanted else wanted | {"warmup_steps": "N"}
    flags = " ".join(f"--{flag} {value}" for flag, value in shown.items())
    straight = params.get("warmup_type", "log") == "linear"
    lowest = [params.get(key) for key in ("warmup_min_lr", "warmup_min_ratio")]
    if straight and ours != "cosine" and all(rate in (None, 0, "auto") for rate in lowest):
        if all(getattr(args, flag) == value for flag, value in wanted.items()):
            return
        raise UsageError(f'{source}: "scheduler" is {flags}: pass these, or remove it')
    by_log = (
        f'; {kind} without "warmup_type": "linear" warms up by the logarithm, half way after the '
        "square root of its steps"
    )
    raise UsageError(
        f'{source}: remove "scheduler" and pass {flags}, which warms up from 0 in a straight line'
        f"{'' if straight else by_log}"
    )


def check_optimizer(config: dict, source: str) -> None:
    """Raises UsageError: the Adam that "optimizer" leads to does not take its "params"."""
    params, zero = config["optimizer"]["params"], config["zero_optimization"]
    if params.get("adam_w_mode", True) is not True:
        raise UsageError(f'{source}: remove "adam_w_mode": --weight_decay is that of AdamW')
    if params.get("torch_adam"):
        adam = torch.optim.AdamW
    else:
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam  # seconds to import

        adam = FusedAdam if _is_off(zero.get("offload_optimizer")) else DeepSpeedCPUAdam
    for key in sorted(params.keys() - _takes(adam) - {"torch_adam", "adam_w_mode"}):
        other = ', or write "torch_adam": true' if key in _takes(torch.optim.AdamW) else ""
        raise UsageError(
            f'{source}: {adam.__name__} has no "optimizer.params.{key}": remove it{other}'
        )


def _takes(optimizer: type) -> set[str]:
    return {*inspect.signature(optimizer).parameters}
