"""Say in one line what is wrong with a launch, before any process is started.

    python -m training.preflight PROGRAM accelerate_config.yaml PROCESSES SEQUENCES [its flags]

The training program makes the same checks; but once processes run, a launcher adds a page of its
own to every error. If SEQUENCES is not 0, the flags are printed that divide so many sequences of a
process and step into micro-batches which fit into the GPUs' memory; if it is "cpu", the flags that
suit a CPU (training/cpu_steps.py). Stdout has nothing else.
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
from training.arguments import TrainingArguments, build_parser, parse_arguments
from training.cpu_steps import cpu_flags
from training.engine.device import require_usable_gpu
from training.engine.estimate import largest_batch
from training.engine.kinds import kind_of
from training.engine.launch import check_precision, deepspeed_plugin, name_configuration
from training.engine.memory import GIB, available_memory
from training.log import require_trackers
from training.prepare import Prepared, prepare
from training.settings import saved_arguments
from training.stage_arguments import DistillationArguments, SFTArguments

KINDS = TrainingArguments, SFTArguments, DistillationArguments
MICRO_BATCH = "batch_size", "accumulation_steps"
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
    args, model_settings = parse_arguments(flags, kind)
    require_trackers(args.trackers)
    require_usable_gpu()
    check_precision(args, torch.cuda.is_available())
    if sequences:  # of all of them the global batch is made, however they are divided
        args = replace(args, batch_size=sequences, accumulation_steps=1)
    deepspeed = read_deepspeed(config_file, processes, args)
    prepared = prepare(args, model_settings, None, processes=int(processes), deepspeed=deepspeed)
    args, start = prepared.args, prepared.start
    if prepared.initial.source and not start.checkpoint:
        prepared.initial.load()
    if not sequences:
        return args
    saved = saved_arguments(start.folder).get("batch_size") if start.checkpoint else None
    if saved and sequences % saved == 0:  # sums in another order would end in other bits
        print(f"micro-batch: {saved} of {sequences} sequences, as saved")
    else:
        saved = fitting_micro_batch(prepared, deepspeed, int(processes))
    args = replace(args, batch_size=saved, accumulation_steps=sequences // saved)
    if deepspeed:
        deepspeed_plugin(args)  # its file may hold a micro-batch as well
    return args


def flags_for_cpu(
    config_file: str, processes: str, flags: list[str], kind: type[TrainingArguments]
) -> list[str]:
    """Return flags that suit a CPU and this engine, as far as they are not among `flags`.

    Raises UsageError, ConfigError or DataError: these flags cannot work.
    """
    args, _ = parse_arguments(flags, kind)
    engine = kind_of(read_deepspeed(config_file, processes, args))
    typed = vars(build_parser(kind).parse_args(flags))
    decided = cpu_flags(typed, engine.takes_muon)
    if "max_steps" in decided:
        print(f"steps: {decided['max_steps']}, which suits a CPU (--max_steps overrides it)")
    return [f"--{name}={value}" for name, value in decided.items()]


def read_deepspeed(config_file: str, processes: str, args: TrainingArguments) -> dict | None:
    """Return DeepSpeed's configuration of this launch, None without DeepSpeed. Raises UsageError:
    the launch cannot work."""
    if not processes.isdigit() or int(processes) < 1:
        raise UsageError(f"the number of processes must be at least 1, not {processes}")
    if not read_launch(config_file, args):
        return None
    os.environ["WORLD_SIZE"] = processes
    return deepspeed_plugin(args).deepspeed_config


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


def fitting_micro_batch(prepared: Prepared, deepspeed: dict | None, processes: int) -> int:
    """Return the largest divisor of a process's sequences that fits on the GPU with the least free
    memory, as --batch_size."""
    sequences = prepared.args.batch_size
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())[:processes]]
    room = min(available_memory(gpu, processes) for gpu in gpus)
    kind = kind_of(deepspeed, prepared.config.dim)
    compiled = prepared.args.compile != "off" and kind.stage != 3
    work = prepared.workload(processes, gpus[0], compiled)
    most = max(1, largest_batch(kind, work, room))
    size = max(n for n in range(1, sequences + 1) if sequences % n == 0 and n <= most)
    print(
        f"micro-batch: {size} of {sequences} sequences, {sequences // size} accumulation steps "
        f"({room / GIB:.1f} GiB on a GPU; --batch_size and --accumulation_steps override it)"
    )
    return size


if __name__ == "__main__":
    with one_line_errors("run_accelerate.sh", UsageError, ConfigError):
        program, config_file, processes, sequences, *flags = sys.argv[1:]
        with redirect_stdout(sys.stderr):
            kind, decided = PROGRAMS[program], []
            if sequences == "cpu":
                decided = flags_for_cpu(config_file, processes, flags, kind)
                sequences = 0
            args = check_launch(config_file, processes, [*flags, *decided], int(sequences), kind)
        if int(sequences):
            decided = [f"--{name}={getattr(args, name)}" for name in MICRO_BATCH]
        print(*decided)
