"""Say in one line what is wrong with a launch, before any process is started.

    python -m training.preflight PROGRAM accelerate_config.yaml PROCESSES SEQUENCES [its flags]

The training program makes the same checks; but once processes run, a launcher adds a page of its
own to every error. If SEQUENCES is not 0, the flags are printed that divide so many sequences of a
process and step into micro-batches which fit into the GPUs' memory: stdout has nothing else.
"""

import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace

import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from common.errors import UsageError, one_line_errors
from model import ConfigError
from training.arguments import TrainingArguments, parse_arguments
from training.checkpointing import require_same_adapters
from training.distillation_arguments import DistillationArguments
from training.engine.device import require_usable_gpu
from training.engine.estimate import estimate, largest_batch
from training.engine.kinds import kind_of
from training.engine.launch import check_precision, deepspeed_plugin, name_configuration
from training.engine.memory import GIB, available_memory
from training.prepare import Prepared, prepare
from training.settings import saved_arguments
from training.sft_arguments import SFTArguments
from training.trackers import require_trackers

KINDS = TrainingArguments, SFTArguments, DistillationArguments
PROGRAMS = {kind.program: kind for kind in KINDS}


def check_launch(
    config_file: str,
    processes: str,
    flags: list[str],
    sequences: int = 0,
    kind: type[TrainingArguments] = TrainingArguments,
) -> TrainingArguments:
    """Return the arguments of this launch, with micro-batches that fit if `sequences` is not 0.

    Raises UsageError, ConfigError or DataError: it cannot work.
    """
    if not processes.isdigit() or int(processes) < 1:
        raise UsageError(f"the number of processes must be at least 1, not {processes}")
    args, model_settings = parse_arguments(flags, kind)
    require_trackers(args.trackers)
    require_usable_gpu()
    check_precision(args, torch.cuda.is_available())
    if sequences:  # of all of them the global batch is made, however they are divided
        args = replace(args, batch_size=sequences, accumulation_steps=1)
    uses_deepspeed = read_launch(config_file, args)
    deepspeed = None
    if uses_deepspeed:
        os.environ["WORLD_SIZE"] = processes
        deepspeed = deepspeed_plugin(args).deepspeed_config
    prepared = prepare(args, model_settings, None, processes=int(processes), deepspeed=deepspeed)
    args, start = prepared.args, prepared.start
    if start.checkpoint:
        lora = prepared.shapes.lora
        require_same_adapters(start.state.get("lora"), lora, str(start.checkpoint))
    elif prepared.initial.source:
        prepared.initial.load()
    if not sequences:
        return args
    size = saved_micro_batch(prepared) or fitting_micro_batch(prepared, deepspeed, int(processes))
    args = replace(args, batch_size=size, accumulation_steps=sequences // size)
    if uses_deepspeed:
        deepspeed_plugin(args)  # its file may hold a micro-batch as well
    return args


def read_launch(config_file: str, args: TrainingArguments) -> bool:
    """Read Accelerate's file and set the environment that its launcher would set; return whether
    DeepSpeed is used. Raises UsageError: Accelerate rejects the file, or it needs more machines."""
    try:
        config = load_config_from_file(config_file)
        section = getattr(config, "deepspeed_config", None) or {}
        fields = list(section)
        path = section.get("deepspeed_config_file", "none")
    except (OSError, ValueError, TypeError, AttributeError, LookupError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"Accelerate rejects {config_file}: {reason}") from error
    if config.num_machines != 1 and os.environ.get("NUM_MACHINES", "1") == "1":
        raise UsageError(
            f"{config_file} is for {config.num_machines} machines: start each with NUM_MACHINES, "
            "MACHINE_RANK and MASTER_ADDR (bash run_accelerate.sh --help)"
        )
    if config.distributed_type == "DEEPSPEED":
        if config.mixed_precision is not None:
            fields.append("mixed_precision")
        os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(map(str, fields))
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)
    name_configuration(args)
    return config.distributed_type == "DEEPSPEED" or bool(args.deepspeed)


def saved_micro_batch(prepared: Prepared) -> int | None:
    """Return the micro-batch of a run that goes on, whatever memory is free now: sums in another
    order would end in other bits. None for a new run, and where it does not divide the sequences.
    """
    start, sequences = prepared.start, prepared.args.batch_size * prepared.args.accumulation_steps
    size = saved_arguments(start.folder).get("batch_size") if start.checkpoint else None
    if not isinstance(size, int) or size < 1 or sequences % size:
        return None
    print(f"micro-batch: {size} of {sequences} sequences, as saved")
    return size


def fitting_micro_batch(prepared: Prepared, deepspeed: dict | None, processes: int) -> int:
    """Return the largest divisor of a process's sequences that fits on the GPU with the least free
    memory, as --batch_size.

    Args:
        deepspeed: its configuration; None without DeepSpeed.
    """
    sequences = prepared.args.batch_size
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())[:processes]]
    room = min(available_memory(gpu, processes) for gpu in gpus)
    kind = kind_of(deepspeed, prepared.config.dim)
    compiled = prepared.args.compile != "off" and kind.stage != 3
    work = prepared.workload(processes, gpus[0], compiled)
    most = max(1, largest_batch(kind, work, room))
    size = max(n for n in range(1, sequences + 1) if sequences % n == 0 and n <= most)
    needed = estimate(kind, replace(work, args=replace(work.args, batch_size=size))).peak
    print(
        f"micro-batch: {size} of {sequences} sequences, {sequences // size} accumulation steps "
        f"(up to {needed / GIB:.1f} of {room / GIB:.1f} GiB on a GPU; --batch_size and "
        "--accumulation_steps override it)"
    )
    return size


if __name__ == "__main__":
    with one_line_errors("run_accelerate.sh", UsageError, ConfigError):
        program, config_file, processes, sequences, *flags = sys.argv[1:]
        with redirect_stdout(sys.stderr):
            kind = PROGRAMS[program]
            args = check_launch(config_file, processes, flags, int(sequences), kind)
        if int(sequences):
            print(f"--batch_size {args.batch_size} --accumulation_steps {args.accumulation_steps}")
