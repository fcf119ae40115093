"""What the launcher and its DeepSpeed file decide about flags that the user has not typed.

They decide the precision (Accelerate's --mixed_precision, or a precision that the file switches
on) and the learning rate (the file's "scheduler"). A typed flag that contradicts them is an error.
"""

import os
from pathlib import Path
from typing import Any

import psutil

from lm.common.errors import UsageError
from lm.engine.deepspeed_config import (
    dtype_of,
    read_config,
    read_file,
    rename_old_keys,
    schedule_flags,
)

# Flags that Accelerate's launcher decides by variables: flag, its name there, its type.
NUMBERS = (
    ("accumulation_steps", "gradient_accumulation_steps", int),
    ("grad_clip", "gradient_clipping", float),
)
ACCELERATE = ("accelerate", "accelerate.commands.accelerate_cli")  # programs that launch
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}  # Accelerate's names → --dtype


def with_launcher_settings(
    typed: dict[str, Any],
    launcher_words: list[str] | None = None,
    saved: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the typed flags, those that the launcher and its DeepSpeed file decide, and, for the
    other flags, the values of a run that is resumed: `saved`.
    `launcher_words` are the flags of `accelerate launch`; None: those of the parent process.
    If the file switches bf16 off, the default of --dtype is float32.
    Raises UsageError if a typed flag contradicts them, or if a schedule cannot be followed."""
    decided: dict[str, tuple[Any, str]] = {}  # flag → value, and who has decided
    if (file := _file(typed)) != "none":
        config = read_config(file)
        flags = schedule_flags(config, file) | dtype_of(config)
        decided |= {name: (value, f"the DeepSpeed file {file}") for name, value in flags.items()}
    if precision := chosen_precision(launcher_words or _words_of_parent()):
        decided["dtype"] = DTYPES[precision], f"the launcher's mixed_precision {precision}"
    for name, key, kind in NUMBERS:
        value = os.environ.get(f"ACCELERATE_{key.upper()}", "auto")
        if value.replace(".", "", 1).isdigit():
            decided[name] = kind(float(value)), f"the launcher's {key} {value}"
    for name, (value, source) in decided.items():
        if typed.get(name, value) != value:
            what = f"--{name} {typed[name]} contradicts {source}"
            raise UsageError(f"{what}: leave it out, or type --{name} {value}")
    if "max_steps" in decided and "epochs" in typed:
        raise UsageError(f"--epochs contradicts {decided['max_steps'][1]}: leave it out")
    settings = (saved or {}) | {name: value for name, (value, _) in decided.items()} | typed
    if file != "none" and (config.get("bf16") or {}).get("enabled") is False:
        settings.setdefault("dtype", "float32")
    return settings


def reading_notes(typed: dict[str, Any]) -> str | None:
    """Return how the DeepSpeed file in use is read, for the start of a run: old names, a schedule,
    keys without effect; None if there is nothing to say."""
    if (file := _file(typed)) == "none":
        return None
    config = read_file(file)
    notes = rename_old_keys(config, file)
    if flags := schedule_flags(config, file):
        said = " ".join(f"--{name} {value}" for name, value in flags.items())
        notes.append(f"{config['scheduler']['type']} is {said}, and its warm-up is linear here")
    if (config.get("bf16") or {}).get("enabled") is False:
        notes.append('"bf16" is off, so the default of --dtype is float32')
    zero = config["zero_optimization"]
    idle = [key for key in zero if key.startswith("stage3_") or key == "sub_group_size"]
    if idle and zero.get("stage") in (1, 2):
        notes.append(f"at stage {zero['stage']} these have no effect: {', '.join(idle)}")
    return f"{file}: {'; '.join(notes)}" if notes else None


def _file(typed: dict[str, Any]) -> str:
    """Return the path of the DeepSpeed file in use, or "none"."""
    launched = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    named = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") if launched else "none"
    return typed.get("deepspeed") or named


def chosen_precision(words: list[str]) -> str | None:
    """Return the precision that the user has chosen for Accelerate's launcher, or None.
    Accelerate passes "no" to the program also if nobody has chosen a precision. The flags of the
    launcher, `words`, and its YAML file tell the difference. Raises UsageError for fp8."""
    chosen = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if words:
        # Importing these takes a second, and only a launcher's child needs them.
        from accelerate.commands.config.config_args import (
            default_config_file,
            load_config_from_file,
        )
        from accelerate.commands.launch import launch_command_parser

        options = launch_command_parser().parse_args([*words, "program"])
        file = options.config_file or (Path(default_config_file).is_file() and default_config_file)
        config = load_config_from_file(file) if file else None
        chosen = options.mixed_precision or (config and config.mixed_precision)
        backend = options.dynamo_backend or (config and config.dynamo_config.get("dynamo_backend"))
        if backend:  # Accelerate does not pass it to DeepSpeed; set_launch_variables refuses it
            os.environ["ACCELERATE_DYNAMO_BACKEND"] = backend
    elif chosen == "no":
        return None
    if chosen and chosen not in DTYPES:
        raise UsageError(f"mixed_precision {chosen} of the launcher: take bf16, fp16 or no")
    return chosen or None


def _words_of_parent() -> list[str]:
    """Return what follows `accelerate launch` in the parent process's command, or []."""
    try:
        words = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):  # no parent, or another user's
        return []
    names = [Path(word).name for word in words]
    for n, name in enumerate(names):
        is_launch = name == "launch" and n and names[n - 1] in ACCELERATE
        if is_launch or name in ("accelerate-launch", "accelerate.commands.launch"):
            return words[n + 1 :]
    return []
