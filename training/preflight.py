"""Say in one line what is wrong with a launch, before any process is started.

    python -m training.preflight PROGRAM accelerate_config.yaml PROCESSES SEQUENCES [its flags]

The training program makes the same checks; but once processes run, a launcher adds a page of its
own to every error. If SEQUENCES is not 0, the flags that divide so many sequences of a process and
step into micro-batches which fit into the GPUs' memory are printed: stdout has nothing else.
"""

import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace

import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from common.errors import UsageError, one_line_errors
from model import ConfigError, LMConfig
from training.arguments import TrainingArguments, parse_arguments
from training.checkpointing import require_same_adapters
from training.distillation_arguments import DistillationArguments
from training.engine.environment import name_configuration
from training.engine.gpu import require_usable_gpus
from training.engine.kinds import kind_of
from training.engine.launch import check_precision, deepspeed_plugin
from training.engine.memory import GIB, available_memory, fits, needs
from training.engine.workload import Beside, Workload
from training.initial_weights import InitialWeights
from training.resume import (
    StartingPoint,
    find_starting_point,
    resumed_arguments,
    starting_weights,
)
from training.settings import saved_arguments
from training.setup import shapes_of, with_data
from training.sft_arguments import SFTArguments
from training.teacher import find_teacher
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
    """The arguments of this launch, with micro-batches that fit if `sequences` is not 0.

    Raises UsageError, ConfigError or DataError: it cannot work.
    """
    if not processes.isdigit() or int(processes) < 1:
        raise UsageError(f"the number of processes must be at least 1, not {processes}")
    args, model_settings = parse_arguments(flags, kind)
    require_trackers(args.trackers)
    require_usable_gpus()
    check_precision(args, torch.cuda.is_available())
    deepspeed = None
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
    if config.distributed_type == "DEEPSPEED" or args.deepspeed:
        os.environ["WORLD_SIZE"] = processes
        deepspeed = deepspeed_plugin(args).deepspeed_config
    initial = InitialWeights.find(starting_weights(args), model_settings)
    teacher = find_teacher(args)
    args = teacher.named_in(args) if teacher else args
    args = with_data(args, initial)
    train_set = args.dataset(args.data, "train", initial.max_seq_len)
    train_set.scan()
    model = initial.config(train_set)
    lora = shapes_of(model, args.adapt).lora
    if teacher:
        teacher.require_fit(train_set)
    start = find_starting_point(args, quiet=True)
    if sequences:
        args = micro_batch_as_saved(args, sequences, start) or fit_micro_batch(
            args, sequences, model, deepspeed, int(processes), teacher and teacher.beside
        )
        if deepspeed:
            deepspeed_plugin(args)  # its file may hold a micro-batch as well
    if start.checkpoint:
        sha256 = teacher and teacher.sha256()
        resumed_arguments(start, args, model, train_set, int(processes), sha256)
        require_same_adapters(start.state.get("lora"), lora, str(start.checkpoint))
    elif initial.source:
        initial.load()
    return args


def micro_batch_as_saved(
    args: TrainingArguments, sequences: int, start: StartingPoint
) -> TrainingArguments | None:
    """Of a run that goes on, whatever is free now: sums in another order would end in other bits.
    None for a new run, and where its micro-batch does not divide the sequences."""
    size = saved_arguments(start.folder).get("batch_size") if start.checkpoint else None
    if not isinstance(size, int) or size < 1 or sequences % size:
        return None
    steps = sequences // size
    print(f"micro-batch: {size} of {sequences} sequences, {steps} accumulation steps, as saved")
    return replace(args, batch_size=size, accumulation_steps=steps)


def fit_micro_batch(
    args: TrainingArguments,
    sequences: int,
    config: LMConfig,
    deepspeed: dict | None,
    processes: int,
    teacher: Beside | None = None,
) -> TrainingArguments:
    """--batch_size and --accumulation_steps so that a process takes so many sequences in a step,
    in micro-batches as large as the GPU with the least memory free allows.

    Args:
        deepspeed: its configuration; None without DeepSpeed.
    """
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())[:processes]]
    room = min(available_memory(gpu, processes) for gpu in gpus)
    kind = kind_of(deepspeed, config.dim)
    work = Workload.of(args, config, processes=processes, device=gpus[0], teacher=teacher)
    sizes = [n for n in range(sequences, 0, -1) if sequences % n == 0]
    shared = [work.but(batch_size=n, accumulation_steps=sequences // n) for n in sizes]
    found = next((each for each in shared if fits(kind, each, room)), shared[-1])
    size, steps = found.batch_size, found.accumulation_steps
    print(
        f"micro-batch: {size} of {sequences} sequences, {steps} accumulation steps "
        f"(up to {needs(kind, found) / GIB:.1f} of {room / GIB:.1f} GiB on a GPU; "
        "--batch_size and --accumulation_steps override it)"
    )
    return replace(args, batch_size=size, accumulation_steps=steps)


if __name__ == "__main__":
    with one_line_errors("run_accelerate.sh", UsageError, ConfigError):
        program, config_file, processes, sequences, *flags = sys.argv[1:]
        with redirect_stdout(sys.stderr):
            kind = PROGRAMS[program]
            args = check_launch(config_file, processes, flags, int(sequences), kind)
        if int(sequences):
            print(f"--batch_size {args.batch_size} --accumulation_steps {args.accumulation_steps}")
