"""What a resumed run takes over from its settings.json, and what must not change.

A typed flag decides, then the launcher, then the run's settings.json, then the default.
"""

from dataclasses import replace
from pathlib import Path

from lm.common.errors import UsageError
from lm.common.numbers import available_cores
from lm.data.dataset import TokenStream
from lm.data.shards import CONVERSATIONS
from lm.engine.accelerate_flags import with_accelerate_flags
from lm.engine.hardware import processes_here, user_sets_threads
from lm.storage.folder import read_settings
from lm.training.arguments import TrainingArguments, as_arguments, flags_of
from lm.training.starting_point import StartingPoint, find_folder
from model import LMConfig, Transformer

# Flags that a resumed run does not take over: those of a launch.
OF_LAUNCH = {"resume", "run_name", "out_dir", "deepspeed", "time_limit", "model"}
# A typed flag → the flag that it replaces. Both decide the same.
REPLACES = {"epochs": "max_steps", "warmup_fraction": "warmup_steps"}
REPLACES |= {"data": "conversations", "conversations": "data"}
UNCOMPARED = ("resume", "run_name", "out_dir")  # flags without effect on training


def decided_arguments(
    typed: dict, arguments: type[TrainingArguments] = TrainingArguments
) -> tuple[TrainingArguments, dict]:
    """Return the training arguments and model settings of a run, new or resumed."""
    saved = saved_flags(typed, arguments)
    if saved and typed.get("teacher") == "auto":  # a resumed run has its own
        typed = {name: value for name, value in typed.items() if name != "teacher"}
    flags = with_accelerate_flags(typed, saved=saved)
    return as_arguments(flags, arguments)


def saved_flags(typed: dict, arguments: type[TrainingArguments]) -> dict:
    """Return the flags that a resumed run takes over from its settings.json, those of a launch
    excepted. Return {} for a new run. Raises UsageError as `find_folder` does."""
    if not typed.get("resume"):
        return {}
    run, checkpoints = find_folder(arguments(**{x: typed[x] for x in OF_LAUNCH & typed.keys()}))
    settings = read_settings(run.settings)
    if not (checkpoints and settings):
        return {}
    saved = settings.get("model", {}) | settings.get("arguments", {})
    known = {item.name for of in (arguments, LMConfig) for item, _ in flags_of(of)}
    gone = OF_LAUNCH | {REPLACES[name] for name in REPLACES.keys() & typed.keys()}
    if not Path(saved.get("data") or "").exists():
        gone.add("data")  # it is prepared or named again
    fits = settings.get("processes_per_machine") == processes_here()
    if user_sets_threads() or not fits or saved.get("threads", 0) > available_cores():
        gone.add("threads")
    saved = {k: v for k, v in saved.items() if k in known - gone and v is not None}
    # The name prevents that a later search finds another run, which has saved in the meantime.
    return saved | {"run_name": run.path.name, "out_dir": str(run.path.parent)}


def with_global_batch(
    start: StartingPoint, args: TrainingArguments, processes: int
) -> TrainingArguments:
    """Return `args`. --accumulation_steps keep the global batch of a resumed run, if possible."""
    if not start.checkpoint or processes == start.state["processes"]:
        return args
    steps, rest = divmod(start.state["identity"]["global_batch"], args.batch_size * processes)
    return replace(args, accumulation_steps=steps) if steps and not rest else args


def run_identity(
    train_set: TokenStream, args: TrainingArguments, processes: int, teacher: str | None = None
) -> dict:
    """Return facts that a resume must keep, as it keeps the shape. `teacher` is its hash."""
    return {
        "tokenizer": train_set.description["tokenizer_sha256"][:16],
        "data": train_set.identity,
        "rows": len(train_set) if train_set.kind == CONVERSATIONS else None,  # as they are packed
        "samples_per_epoch": train_set.samples_per_epoch if train_set.segmentations > 1 else None,
        "global_batch": args.global_batch(processes),
        "seed": args.seed,
        "optimizer": args.optimizer,
        "teacher": teacher,
    }


def require_same_run(start: StartingPoint, shapes: Transformer, identity: dict) -> None:
    """Raise UsageError if a resumed run would have another identity, model or adapters."""
    if not start.checkpoint:
        return
    saved = LMConfig.from_dict(start.state["model"]).shape() | start.state["identity"]
    saved["lora"] = start.state.get("lora")
    now = shapes.config.shape() | identity | {"lora": shapes.lora and vars(shapes.lora)}
    different = [
        f"{key}: {saved.get(key)} in the checkpoint, {now.get(key)} now"
        for key in sorted(saved | now)
        if saved.get(key) != now.get(key)
    ]
    if different:
        raise UsageError(
            f"cannot resume {start.checkpoint}: {'; '.join(different)}; the flags that "
            f"resume it are in {start.folder.settings}"
        )


def changes_since_stop(start: StartingPoint, settings: dict) -> list[str]:
    """Return a line for each value (flag, engine, processes) of new `settings` that differs from a
    resumed run's settings.json, which still describes the previous launch."""
    if not start.checkpoint:
        return []

    def facts(of: dict) -> dict:
        flags = of.get("model", {}) | of.get("arguments", {})
        named = {f"--{name}": value for name, value in flags.items() if name not in UNCOMPARED}
        return named | {name: of[name] for name in ("engine", "processes") if name in of}

    before = facts(read_settings(start.folder.settings))
    return [
        f"changed since the run was stopped: {name} {before[name]} → {value}"
        for name, value in facts(settings).items()
        if before.get(name, value) != value
    ]
