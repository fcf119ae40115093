"""Decide how run_accelerate.sh trains, and print the launcher's arguments.

python -m lm.launch.preflight [flags of the training program]
"""

import os
import shlex
import sys
import time

import psutil
import torch
from accelerate.commands import launch

from lm.common.errors import UsageError, one_line_errors
from lm.common.numbers import available_cores, counted, size
from lm.common.tasks import forget_tasks, starter_of_tasks
from lm.data.conversations import CHAT_SUFFIXES
from lm.data.corpus import BUILTIN, SUFFIXES, find_files, text_size
from lm.engine.accelerate_flags import with_accelerate_flags
from lm.engine.engine import OTHER_ENGINES
from lm.engine.hardware import cpu_emulates_bf16, require_usable_gpu
from lm.launch.candidates import Candidates
from lm.launch.shell_variables import ShellVariables
from lm.launch.time_budget import MOST_PREPARING, TimeBudget
from lm.training.arguments import as_arguments, as_words, build_parser
from lm.training.resume import saved_flags
from model import ConfigError

# Bytes that a core prepares in a second, roughly.
TEXT_PER_CORE, CHAT_PER_CORE = 4e6, 4e5


def read_launch(config_file: str) -> str | None:
    """Read Accelerate's file, and set the variables that `accelerate launch` sets for its engine.
    Return Accelerate's name of the precision that the file chooses, if any. Raises UsageError if
    the file is invalid or contradicts other settings."""
    try:
        words = ["--config_file", config_file, "--num_processes", "1", "--num_machines", "1"]
        options = launch.launch_command_parser().parse_args([*words, "program"])
        options, config, has_precision = launch._validate_launch_command(options)
        if options.use_deepspeed:
            fields = [*config.deepspeed_config, *["mixed_precision"] * has_precision]
            options.deepspeed_fields_from_accelerate_config = ",".join(map(str, fields))
            options.main_process_port = 0
            _, environ = launch.prepare_deepspeed_cmd_env(options)
            found = {k: v for k, v in environ.items() if k.startswith("ACCELERATE_")}
            os.environ.update(found | {"ACCELERATE_MIXED_PRECISION": "no"})
        if options.dynamo_backend != "no":
            os.environ["ACCELERATE_DYNAMO_BACKEND"] = str(options.dynamo_backend)
        for name in OTHER_ENGINES:
            if getattr(options, f"use_{name.lower()}"):
                os.environ[f"ACCELERATE_USE_{name}"] = "true"
    except Exception as error:  # a file that is wrong can raise anything
        reason = " ".join(str(error).split())
        raise UsageError(f"Accelerate rejects {config_file}: {reason}") from error
    if config.num_machines != 1 and os.environ.get("NUM_MACHINES", "1") == "1":
        remedy = "set NUM_MACHINES, MACHINE_RANK and MASTER_ADDR"
        raise UsageError(f"{config_file} is for {config.num_machines} machines: {remedy}")
    return config.mixed_precision


def announce_preparation(request: ShellVariables) -> None:
    """Say it before a preparation that will take a large part of the time."""
    source, suffixes, speed = request.get("DATA", BUILTIN), SUFFIXES, TEXT_PER_CORE
    if request.stage == "sft":
        source, suffixes, speed = request.get("CHAT", BUILTIN), CHAT_SUFFIXES, CHAT_PER_CORE
    n_bytes = 0 if source == BUILTIN else text_size(find_files(source, suffixes))
    takes = n_bytes / speed / available_cores() / 60
    if takes > MOST_PREPARING * request.minutes:
        text = f"preparing {size(n_bytes)} may take about {takes:.0f} min, if it is not prepared"
        print(f"{text} yet: above half of the {request.minutes:g} min, they begin at its end")


def main(words: list[str]) -> list[str]:
    """Return the launcher's arguments. Raises UsageError or ConfigError if they cannot work."""
    loading = time.time() - psutil.Process().create_time()
    starter = starter_of_tasks()
    if starter and not os.environ.get("NUM_MACHINES"):
        once = "start it once per machine, with NUM_MACHINES, MACHINE_RANK and MASTER_ADDR"
        raise UsageError(f"{starter} has started this command several times: {once}")
    forget_tasks()
    request = ShellVariables(os.environ)
    typed = vars(build_parser(request.arguments).parse_args(words))
    as_arguments({**typed}, request.arguments)  # a mistake should not cost the time to prepare text
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found no GPU
    precision = read_launch(request.config)
    require_usable_gpu()
    flags = {"dtype": "float16"} if request.get("ENGINE") == "fp16" else {}
    flags = with_accelerate_flags(flags | typed, precision)
    saved = saved_flags(flags, request.arguments)  # refuses a resume before text is prepared
    if not (saved or "data" in typed):
        announce_preparation(request)
    if "dtype" not in flags | saved and not torch.cuda.is_available() and cpu_emulates_bf16():
        print("--dtype float32, because this CPU would emulate bf16")
        flags["dtype"] = "float32"
    begun = time.time()
    flags, chosen = request.data_flags(typed, saved) | flags, {}  # prepares text
    if saved:
        print("resumed with the flags of the run and the typed flags; MINUTES has no effect")
    else:
        candidates = Candidates(request, flags)  # prepares conversations
        chosen = TimeBudget(candidates, loading, time.time() - begun).flags()
    print(f"starting {counted(request.processes, 'processes')}; PyTorch is loaded again")
    added = {name: value for name, value in (chosen | flags).items() if name not in typed}
    return [*request.launcher_words(), request.arguments.program, *as_words(added), *words]


if __name__ == "__main__":
    # stdout is for the launcher's arguments, so everything else that is printed goes to stderr.
    output = os.dup(1)
    os.dup2(2, 1)
    with one_line_errors("run_accelerate.sh", UsageError, ConfigError):
        os.write(output, os.fsencode(shlex.join(main(sys.argv[1:]))))
