"""Flags that Accelerate's launcher and its DeepSpeed file decide, unless they are typed."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from lm.common.errors import UsageError
from lm.engine.deepspeed_config import (
    file_of,
    flags_of_config,
    read_config,
    read_file,
    rename_old_keys,
    schedule_flags,
    section_of,
)

# Keys of "zero_optimization" without effect at stages 1 and 2, beside "stage3_...".
ONLY_STAGE_3 = ("sub_group_size", "leaf_module", "memory_efficient_linear")
ONLY_STAGE_3 += ("override_module_apply", "zero_hpz_partition_size")
# Flags that Accelerate's launcher decides by variables: flag, its name there, its type.
NUMBERS = (
    ("accumulation_steps", "gradient_accumulation_steps", int),
    ("grad_clip", "gradient_clipping", float),
)
# A command of Accelerate's launcher, its words divided by "\0", and the words of its flags.
LAUNCHER = re.compile(
    r"accelerate(?:-|\.commands\.|(?:\.commands\.accelerate_cli)?\0)launch\0(.*)", re.DOTALL
)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}  # Accelerate's names → --dtype


def with_accelerate_flags(
    typed: dict, precision: str | None = None, saved: dict | None = None
) -> dict[str, Any]:
    """Return the typed flags, those that the launcher and its DeepSpeed file decide, and, for the
    other flags, the values of a run that is resumed: `saved`.
    `precision` is that of a launcher that will start later; None: the running launcher's, if any.
    If the file switches bf16 off, the default of --dtype is float32.
    Raises UsageError if a typed flag contradicts them, or if a schedule cannot be followed."""
    decided: dict[str, tuple[Any, str]] = {}  # flag → value, and who has decided
    if (file := file_of(typed.get("deepspeed"))) != "none":
        config = read_config(file)
        flags = flags_of_config(config, file)
        decided |= {name: (value, f"the DeepSpeed file {file}") for name, value in flags.items()}
    if precision := precision or chosen_precision():
        if precision not in DTYPES:
            raise UsageError(f"mixed_precision {precision} of the launcher: take bf16, fp16 or no")
        decided["dtype"] = DTYPES[precision], f"the launcher's mixed_precision {precision}"
    for name, key, number in NUMBERS:
        value = os.environ.get(f"ACCELERATE_{key.upper()}", "auto")
        if value.replace(".", "", 1).isdigit():
            decided[name] = number(float(value)), f"the launcher's {key} {value}"
    for name, (value, source) in decided.items():
        if typed.get(name, value) != value:
            what = f"--{name} {typed[name]} contradicts {source}"
            raise UsageError(f"{what}: leave it out, or type --{name} {value}")
    if "max_steps" in decided and "epochs" in typed:
        raise UsageError(f"--epochs contradicts {decided['max_steps'][1]}: leave it out")
    settings = (saved or {}) | {name: value for name, (value, _) in decided.items()} | typed
    if file != "none" and section_of(config, "bf16.").get("enabled") is False:
        settings.setdefault("dtype", "float32")
    return settings


def reading_notes(typed: dict[str, Any]) -> str | None:
    """Return how the DeepSpeed file in use is read, for the start of a run: old names, a schedule,
    keys without effect; None if there is nothing to say."""
    if (file := file_of(typed.get("deepspeed"))) == "none":
        return None
    config = read_file(file)
    notes = rename_old_keys(config, file)
    if flags := schedule_flags(config, file):
        said = " ".join(f"--{name} {value}" for name, value in flags.items())
        notes.append(f"{config['scheduler']['type']} is {said}, and its warm-up is linear here")
    if section_of(config, "bf16.").get("enabled") is False:
        notes.append('"bf16" is off, so the default of --dtype is float32')
    zero = config["zero_optimization"]
    idle = [key for key in zero if key.startswith("stage3_") or key in ONLY_STAGE_3]
    if idle and zero.get("stage") in (1, 2):
        notes.append(f"at stage {zero['stage']} these have no effect: {', '.join(idle)}")
    return f"{file}: {'; '.join(notes)}" if notes else None


def chosen_precision() -> str | None:
    """Return the precision that the user has chosen for Accelerate's launcher, or None. Note a
    compiler that Accelerate does not pass to DeepSpeed: `set_launch_variables` refuses it."""
    chosen = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if chosen != "no" and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return chosen
    # Accelerate also sets "no" if nobody has chosen a precision, and says so in no variable. Only
    # the command of the launcher, this process's parent, and its YAML file tell "no" from nothing.
    found = None
    with suppress(psutil.Error, AttributeError):  # no parent, or another user's
        found = LAUNCHER.search("\0".join(psutil.Process().parent().cmdline()))
    if not found:
        return None if chosen == "no" else chosen
    # Importing these takes a second, and only a launcher's child needs them.
    from accelerate.commands.config import config_args
    from accelerate.commands.launch import launch_command_parser

    options = launch_command_parser().parse_args(found[1].split("\0"))
    file = options.config_file or config_args.default_config_file
    has_file = options.config_file or Path(file).is_file()
    config = config_args.load_config_from_file(file) if has_file else None
    backend = options.dynamo_backend or (config and config.dynamo_config.get("dynamo_backend"))
    if backend:
        os.environ["ACCELERATE_DYNAMO_BACKEND"] = backend
    if chosen != "no":
        return chosen
    return options.mixed_precision or (config and config.mixed_precision)
