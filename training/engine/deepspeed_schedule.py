"""A scheduler in DeepSpeed's file, followed by this project's own schedule.

The names are those of deepspeed/runtime/lr_schedules.py. DeepSpeed's curve is behind by two steps:
at its first two the rate is warmup_min_lr.
"""

from dataclasses import replace

from common.errors import UsageError
from training.arguments import TrainingArguments
from training.engine.deepspeed_keys import refuse_unknown

SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
# Keys and DeepSpeed's defaults. The warm-up begins at 0 here, in a straight line.
PARAMS = {
    "warmup_num_steps": 1000,
    "warmup_max_lr": "auto",
    "warmup_min_lr": 0,
    "warmup_min_ratio": 0,
    "warmup_type": "log",
    "total_num_steps": "auto",
    "cos_min_ratio": 0.0001,
    "last_batch_iteration": -1,
}


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
    kind, given = None, {}
    if isinstance(section, dict):
        kind, given = section.get("type"), section.get("params", {})
    if kind not in [*SCHEDULES] or not isinstance(given, dict):
        raise UsageError(
            f'{source}: "scheduler" must be a section with the type {", ".join(SCHEDULES)} and '
            f"its params, not {kind!r}"
        )
    params = PARAMS | given
    problems = [*refuse_unknown(given, [*PARAMS], "scheduler.params.")]
    problems += [
        f'remove "scheduler.params.{key}": the warm-up begins at 0 here'
        for key in ("warmup_min_lr", "warmup_min_ratio")
        if params[key] not in (0, "auto")
    ]
    wanted = {
        "lr_schedule": SCHEDULES[kind],
        "warmup_steps": params["warmup_num_steps"],
        "learning_rate": params["warmup_max_lr"],
    }
    if kind != "WarmupLR":
        wanted["max_steps"] = params["total_num_steps"]
        wanted["min_lr_ratio"] = params["cos_min_ratio"] if kind == "WarmupCosineLR" else 0
    values = {"lr_schedule": SCHEDULES[kind]}
    for flag, value in wanted.items():
        typed = getattr(args, flag)
        default = TrainingArguments.min_lr_ratio if flag == "min_lr_ratio" else None
        if value in ("auto", typed):
            continue
        if flag != "lr_schedule" and not isinstance(value, int | float):
            problems.append(f'"scheduler" needs a number for --{flag}, not {value!r}')
        elif typed == default:
            values[flag] = value
        else:
            problems.append(f'"scheduler" says --{flag} {value}, the flags say {typed}')
    if problems:
        raise UsageError(f"{source}: {'; '.join(problems)}")
    said = " ".join(f"--{flag} {value}" for flag, value in values.items())
    return replace(args, **values), f"{kind} of {source} is {said}; the warm-up is linear here"
