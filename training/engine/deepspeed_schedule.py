"""A scheduler in DeepSpeed's file, followed by this project's own schedule.

The names are those of deepspeed/runtime/lr_schedules.py. DeepSpeed's curve is behind by two steps:
at its first two the rate is warmup_min_lr.
"""

from dataclasses import replace

from common.errors import UsageError
from training.arguments import TrainingArguments

SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
FOLLOWED = ("warmup_num_steps", "warmup_max_lr", "total_num_steps", "cos_min_ratio")
# Parameters that may stand there; the warm-up begins at 0 here, in a straight line.
AT_0 = ("warmup_min_lr", "warmup_min_ratio")
WITHOUT_EFFECT = ("warmup_type", "last_batch_iteration")


def take_schedule(
    config: dict | None, args: TrainingArguments, source: str = "the DeepSpeed file"
) -> tuple[TrainingArguments, str | None]:
    """Return the arguments with the schedule of a DeepSpeed file, and a sentence that says so.

    Where no flag and no file says anything, the schedule is a cosine, and there is no sentence.

    Args:
        config: contents of the file; None without DeepSpeed.

    Raises UsageError: a flag contradicts the file, or the file asks for another curve.
    """
    section = (config or {}).get("scheduler")
    if section is None:
        return replace(args, lr_schedule=args.lr_schedule or "cosine"), None
    kind, params = section.get("type"), section.get("params", {})
    if kind not in SCHEDULES:
        raise UsageError(f'{source}: "scheduler" must be {", ".join(SCHEDULES)}, not {kind!r}')
    problems = [
        f'remove "scheduler.params.{key}": it is not followed here, the warm-up begins at 0'
        for key, value in params.items()
        if key not in (*FOLLOWED, *WITHOUT_EFFECT) and not (key in AT_0 and value in (0, "auto"))
    ]
    wanted = {
        "lr_schedule": SCHEDULES[kind],
        "warmup_steps": params.get("warmup_num_steps", 1000),
        "learning_rate": params.get("warmup_max_lr", "auto"),
    }
    if kind != "WarmupLR":
        floor = params.get("cos_min_ratio", 0.0001) if kind == "WarmupCosineLR" else 0
        wanted |= {"max_steps": params.get("total_num_steps", "auto"), "min_lr_ratio": floor}
    values = {"lr_schedule": SCHEDULES[kind]}
    for flag, value in wanted.items():
        typed = getattr(args, flag)
        default = TrainingArguments.min_lr_ratio if flag == "min_lr_ratio" else None
        if typed == default and value != "auto":
            values[flag] = value
        elif value not in ("auto", typed):
            problems.append(f'"scheduler" says --{flag} {value}, the flags say {typed}')
    if problems:
        raise UsageError(f"{source}: {'; '.join(problems)}")
    said = " ".join(f"--{flag} {value}" for flag, value in values.items())
    return replace(args, **values), f"{kind} of {source} is {said}; the warm-up is linear here"
