"""Check a launch before its processes start, and print flags to add to it.

    python -m training.preflight PROGRAM accelerate_config.yaml PROCESSES SHARE [flags of PROGRAM]

The training program makes the same checks, but its launcher adds a page of output to each
error. SHARE is a number of sequences per process and step, to divide into micro-batches that fit
into a GPU's memory; or "cpu", for flags that suit a CPU; or 0, for no flags.
"""

import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace

import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from common.errors import UsageError, one_line_errors
from data.shards import read_description
from model import ConfigError
from training.arguments import PROGRAMS, TrainingArguments, as_arguments, build_parser
from training.engine.compilation import should_compile
from training.engine.device import GIB, available_memory, require_usable_gpu
from training.engine.estimate import kind_of, largest_batch
from training.engine.launch import check_precision, deepspeed_plugin, set_launch_variables
from training.log import require_trackers
from training.prepare import Prepared, prepare
from training.resume import saved_arguments

# Passes over the text on a CPU. More passes teach less and less: https://arxiv.org/abs/2305.16264
PASSES = 4
TOKENS_PER_STEP = 4096  # global batch of run_accelerate.sh on a CPU
MIN_STEPS, MAX_STEPS = 100, 600  # steps on a CPU
STEPS_WITH_TEACHER = 180  # steps on a CPU with a teacher, which makes a step slower
# Muon reaches a validation loss 0.6 lower than AdamW. The rate falls in a straight line to 0.
MUON = {
    "optimizer": "muon",
    "muon_learning_rate": 0.02,
    "learning_rate": 1e-2,
    "lr_schedule": "wsd",
    "decay_fraction": 1.0,
    "min_lr_ratio": 0.0,
}
ADAMW = {"optimizer": "adamw", "learning_rate": 3e-3}


def check_launch(
    config_file: str,
    processes: str,
    flags: list[str],
    share: str = "0",
    kind: type[TrainingArguments] = TrainingArguments,
) -> dict:
    """Return the flags to add to the launch, by name. Raises UsageError, ConfigError or DataError
    if the launch cannot work."""
    typed = vars(build_parser(kind).parse_args(flags))
    args, model_settings = as_arguments(dict(typed), kind)
    require_trackers(args.trackers)
    require_usable_gpu()
    check_precision(args, torch.cuda.is_available())
    if not processes.isdigit() or int(processes) < 1:
        raise UsageError(f"the number of processes must be at least 1, not {processes}")
    has_deepspeed = read_launch(config_file, args)
    os.environ["WORLD_SIZE"] = processes

    def deepspeed(args: TrainingArguments) -> dict | None:
        """Return DeepSpeed's configuration. Raises UsageError if it contradicts the flags."""
        return deepspeed_plugin(args).deepspeed_config if has_deepspeed else None

    added, sequences = {}, 0
    if share == "cpu":
        added = cpu_flags(typed, kind_of(deepspeed(args)).takes_muon)
    elif sequences := int(share):  # micro-batches do not change the global batch
        args = replace(args, batch_size=sequences, accumulation_steps=1)
    args = replace(args, **added)
    config = deepspeed(args)
    prepared = prepare(args, model_settings, None, int(processes))
    if prepared.source and not prepared.start.checkpoint:
        prepared.source.load()
    if sequences:
        size = fitting_micro_batch(prepared, config, int(processes))
        added = {"batch_size": size, "accumulation_steps": sequences // size}
        deepspeed(replace(prepared.args, **added))  # raises if the file has another micro-batch
    return added


def read_launch(config_file: str, args: TrainingArguments) -> bool:
    """Read Accelerate's file, set the environment as its launcher would, and return whether
    DeepSpeed is used. Raises UsageError if the file is invalid, or is for several machines."""
    try:
        config = load_config_from_file(config_file)
        section = getattr(config, "deepspeed_config", None) or {}
        fields = list(section)
        path = section.get("deepspeed_config_file", "none")
    except (OSError, ValueError, TypeError, AttributeError, LookupError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"Accelerate rejects {config_file}: {reason}") from error
    if config.num_machines != 1 and os.environ.get("NUM_MACHINES", "1") == "1":
        remedy = "set NUM_MACHINES, MACHINE_RANK and MASTER_ADDR"
        raise UsageError(f"{config_file} is for {config.num_machines} machines: {remedy}")
    if config.distributed_type == "DEEPSPEED":
        if config.mixed_precision is not None:
            fields.append("mixed_precision")
        os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(map(str, fields))
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)
    set_launch_variables(args)
    return config.distributed_type == "DEEPSPEED" or bool(args.deepspeed)


def fitting_micro_batch(prepared: Prepared, deepspeed: dict | None, processes: int) -> int:
    """Return the largest divisor of a process's sequences that fits on the GPU with the least free
    memory. A resumed run keeps its micro-batch, because another order of sums changes the bits."""
    sequences, start = prepared.args.batch_size, prepared.start
    saved = saved_arguments(start.folder).get("batch_size") if start.checkpoint else None
    if saved and sequences % saved == 0:
        print(f"micro-batch: {saved} of {sequences} sequences, as saved")
        return saved
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())[:processes]]
    room = min(available_memory(gpu, processes) for gpu in gpus)
    kind = kind_of(deepspeed, prepared.config.dim)
    compiled = should_compile(prepared.args.compile, prepared.run_flops, gpus[0])
    most = max(1, largest_batch(kind, prepared.workload(processes, gpus[0], compiled), room))
    size = max(n for n in range(1, sequences + 1) if sequences % n == 0 and n <= most)
    print(
        f"micro-batch: {size} of {sequences} sequences, {sequences // size} accumulation steps "
        f"({room / GIB:.1f} GiB on a GPU; --batch_size and --accumulation_steps override it)"
    )
    return size


def cpu_flags(typed: dict, takes_muon: bool) -> dict:
    """Return the flags of steps and optimizer for a run of a few minutes, except typed flags. The
    steps make PASSES over the text, or one pass if the data has several segmentations of the
    text (data/encoding.py). Raises DataError if --data is no prepared text."""
    steps = STEPS_WITH_TEACHER
    if "teacher" not in typed:
        description = read_description(typed["data"])
        several = description.get("prepared_from", {}).get("segmentations", 1) > 1
        passes = 1 if several else PASSES
        tokens = description["splits"]["train"]["tokens"]
        steps = min(MAX_STEPS, max(MIN_STEPS, int(passes * (tokens / TOKENS_PER_STEP))))
    flags = {} if "epochs" in typed else {"max_steps": steps}
    flags |= MUON if takes_muon else ADAMW
    added = {name: value for name, value in flags.items() if name not in typed}
    if "max_steps" in added:
        print(f"steps: {steps}, which suits a CPU (--max_steps overrides it)")
    return added


if __name__ == "__main__":
    with one_line_errors("run_accelerate.sh", UsageError, ConfigError):
        program, config_file, processes, share, *flags = sys.argv[1:]
        with redirect_stdout(sys.stderr):
            added = check_launch(config_file, processes, flags, share, PROGRAMS[program])
        print(*(f"--{name}={value}" for name, value in added.items()))
