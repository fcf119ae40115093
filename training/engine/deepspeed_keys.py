"""The keys of DeepSpeed's JSON file that act here; every other key is refused by name.

Names and defaults as DeepSpeed 0.19 reads them (deepspeed/runtime/config.py). DeepSpeed itself
checks the sections that have no line in `KNOWN`.
"""

import difflib
from collections.abc import Iterator

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
# Keys that flags replace, that have no effect here, that round weights or what is sent, or whose
# state checkpoints would miss (docs/engines.md).
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
]
# Old names, which Accelerate does not read, and the new ones.
RENAMED = {
    "bfloat16": "bf16",
    "zero_optimization.cpu_offload": "offload_optimizer",
    "zero_optimization.cpu_offload_param": "offload_param",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_...",
}
# Keys of "zero_optimization" that do nothing below stage 3, besides those that begin with stage3_.
OF_STAGE_3 = [
    *("leaf_module", "memory_efficient_linear", "offload_param", "override_module_apply"),
    *("sub_group_size", "zero_hpz_partition_size"),
]


def settle_keys(config: dict) -> list[str]:
    """Drop keys that are not followed and switched off; return the problems of the others.

    Args:
        config: with a ZeRO stage of 1, 2 or 3; changed in place.
    """
    problems, aio = [], config.get("aio")
    if isinstance(aio, dict) and "thread_count" in aio:  # as the guides call it still
        aio.setdefault("intra_op_parallelism", aio.pop("thread_count"))
    for path in (*REFUSED, *RENAMED):
        *parents, name = path.split(".")
        section = config
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if isinstance(section, dict) and not is_off(section.pop(name, None)):
            why = "this script does not follow it"
            if path in RENAMED:
                why = f'it is called "{RENAMED[path]}" now'
            problems.append(f'remove "{path}": {why}')
    zero = config["zero_optimization"]
    problems += _check_stage(zero)
    for name, known in KNOWN.items():
        section = config.get(name) if name else config
        if isinstance(section, dict):
            problems += refuse_unknown(section, known.split(), f"{name}." if name else "")
    return problems


def is_off(value) -> bool:
    """Return whether a value asks for nothing, as if the key were missing."""
    if isinstance(value, dict):
        off = value.get("enabled") is False or value.get("device") == "none"
        return off or all(map(is_off, value.values()))
    return value is None or value is False


def _check_stage(zero: dict) -> Iterator[str]:
    """Yield what DeepSpeed would ignore without a word."""
    stage, offload = zero["stage"], zero.get("offload_optimizer")
    if isinstance(offload, dict) and offload.get("ratio", 1) != 1:
        yield 'remove "ratio" of "offload_optimizer": checkpoints would miss some of its state'
    if stage == 3:
        return
    for key, value in zero.items():
        if (key.startswith("stage3_") or key in OF_STAGE_3) and not is_off(value):
            yield f'remove "zero_optimization.{key}": it does nothing at stage {stage}, only at 3'
    if isinstance(offload, dict) and offload.get("device") == "nvme":
        yield (
            f'"offload_optimizer" at stage {stage} would go to the CPU\'s memory where it says '
            '"nvme": write "cpu", or take stage 3'
        )


def refuse_unknown(section: dict, known: list[str], prefix: str) -> Iterator[str]:
    """Yield a problem for each key that is not among the known ones."""
    for key in section:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            guess = f'did you mean "{prefix}{close[0]}"?' if close else "remove it"
            yield f'"{prefix}{key}" does nothing here: {guess}'
