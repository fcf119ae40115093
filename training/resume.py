"""Choose the run folder and the checkpoint to resume from; write the run's settings.json."""

import json
import platform
import sys
import time
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from common.atomic import write_whole
from common.errors import UsageError
from data.chat_template import PLAIN_JINJA
from data.dataset import TokenStream
from data.shards import CONVERSATIONS
from data.tokenizer import TOKENIZER_FILES, copy_tokenizer
from engine.engine import Engine
from model import LMConfig, Transformer
from storage.checkpoint import STATE, newest_undamaged, read_state, run_of
from storage.find import program_of, run_to_resume
from storage.folder import RunFolder, claim, read_settings, step_of
from training.arguments import TrainingArguments
from training.rates import FROM_WEIGHTS, Default

PACKAGES = ("torch", "accelerate", "deepspeed", "numpy", "sentencepiece")


@dataclass(frozen=True)
class StartingPoint:
    """The run folder to write to, and the checkpoint to resume from."""

    folder: RunFolder
    checkpoint: Path | None = None  # None: a new run
    state: dict = field(default_factory=dict)  # state.json of the checkpoint; {} for a new run
    arguments: dict = field(default_factory=dict)  # in settings.json; {} for a new run

    @property
    def step(self) -> int:
        """The step after which the checkpoint was saved; 0 for a new run."""
        return self.state.get("step", 0)


def find_starting_point(args: TrainingArguments, claims: bool = False) -> StartingPoint:
    """Find the run folder and, for --resume, its newest undamaged checkpoint or the named one.
    With `claims`, lock an existing folder first: a run that is ending may save another checkpoint.
    Raises UsageError as `find_folder` does, and if all checkpoints are damaged."""
    run, checkpoints = find_folder(args, claims)
    newest, problems = newest_undamaged(checkpoints)
    for path, problem in problems.items():
        print(f"DAMAGED CHECKPOINT {path}: {problem}")
    if newest:
        arguments = read_settings(run.settings).get("arguments", {})
        return StartingPoint(run, newest, read_state(newest), arguments)
    if problems:
        reason = f"no undamaged checkpoint, {path} is damaged: {problem}"
        raise UsageError(f"--resume {args.resume}: {reason}")
    return StartingPoint(run)


def find_folder(args: TrainingArguments, claims: bool = False) -> tuple[RunFolder, list[Path]]:
    """Return the run folder and, for --resume, its checkpoints, which are not read.
    Raises UsageError if the path has no checkpoint, or another run is there."""
    out = Path(args.out_dir)
    run = RunFolder(out / (args.run_name or time.strftime("%Y%m%d-%H%M%S")))
    named = None if args.resume in (None, "auto") else Path(args.resume).resolve()
    if args.resume == "auto":
        run = run_to_resume(out, args.program, args.run_name) or run
    elif named:
        saved = RunFolder(named).all_checkpoints() or [named]
        if not any((path / STATE).is_file() for path in saved):
            reason = "neither a run with checkpoints nor a checkpoint"
            raise UsageError(f"--resume {args.resume}: {reason}")
        run = run_of(saved[-1])
        if args.run_name not in (None, run.path.name):
            raise UsageError(f"--run_name {args.run_name}: leave it out, {run.path} is resumed")
    if run.settings.exists() and (program := program_of(run)) != args.program:
        remedy = "resume it with that program" if named else "choose another --run_name"
        raise UsageError(f"{run.path} holds a run of {program}: {remedy}")
    if claims and run.path.exists():
        claim(run)
    if run.metrics.exists() and not args.resume:
        raise UsageError(f"{run.path} holds a run: pass --resume auto, or another --run_name")
    checkpoints = run.all_checkpoints() if args.resume else []
    if named:
        checkpoints = RunFolder(named).all_checkpoints() or [named]
    elif args.resume and not checkpoints:
        searched = out / (args.run_name or "")
        print(f"--resume auto: no checkpoint in {searched}, a new run starts")
    return run, checkpoints


def with_own_weights(args: TrainingArguments, start: StartingPoint) -> TrainingArguments:
    """Return `args`. At a resume, weights in the run folder replace --init_from, which may be
    gone. The run's own teacher replaces --teacher auto, as there may be a newer run."""
    if start.checkpoint and args.init_from:
        base = start.folder.base
        args = replace(args, init_from=str(base if base.exists() else start.checkpoint))
    if start.checkpoint and args.teacher == "auto":
        args = replace(args, teacher=start.arguments.get("teacher", "auto"))
    return args


def with_own_rates(start: StartingPoint, args: TrainingArguments) -> TrainingArguments:
    """Return `args` with learning rates and warm-up as plain numbers. At a resume, those that are
    not typed are the run's own; what an older run does not have is as in a run from weights."""
    rates = {name: float(getattr(args, name)) for name in FROM_WEIGHTS}
    if "learning_rate" in start.arguments:
        untyped = [name for name in rates if isinstance(getattr(args, name), Default)]
        rates |= {name: float(start.arguments.get(name, FROM_WEIGHTS[name])) for name in untyped}
    return replace(args, **rates)


def run_identity(train_set: TokenStream, args: TrainingArguments, processes: int) -> dict:
    """Return facts that, like the model's shape, must stay the same when a run is resumed."""
    return {
        "tokenizer": train_set.description["tokenizer_sha256"][:16],
        "data": train_set.identity,
        "global_batch": args.global_batch(processes),
        "seed": args.seed,
        "optimizer": args.optimizer,
    }


def resumed_arguments(
    start: StartingPoint,
    args: TrainingArguments,
    shapes: Transformer,
    identity: dict,
    processes: int,
) -> tuple[TrainingArguments, dict]:
    """Return `args` and `identity`, with --accumulation_steps changed to keep the global batch if
    the number of processes changed. Raises UsageError if a fact still differs."""
    saved = LMConfig.from_dict(start.state["model"]).shape() | start.state["identity"]
    saved["lora"] = start.state.get("lora")
    steps, rest = divmod(saved["global_batch"], args.batch_size * processes)
    if processes != start.state["processes"] and steps and not rest:
        args = replace(args, accumulation_steps=steps)
        identity = identity | {"global_batch": args.global_batch(processes)}
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
    return args, identity


def set_aside(start: StartingPoint) -> None:
    """Rename final weights, and checkpoints after `start.step`: the resumed run writes new ones."""
    run = start.folder
    old = [path for path in run.all_checkpoints() if step_of(path) > start.step]
    for path in [*old, run.weights]:
        if path.exists():
            path.rename(f"{path}.aside-{time.time_ns()}")
            print(f"set aside {path}: the run goes on from step {start.step}", flush=True)


def write_settings(
    run: RunFolder, args: TrainingArguments, config: LMConfig, engine: Engine, data: TokenStream
) -> None:
    """Write settings.json and the tokenizer; for conversations, the chat template too."""
    settings = {
        "program": args.program,
        "command": sys.argv,
        "arguments": vars(args),
        "model": config.to_dict(),
        "engine": engine.name,
        "processes": engine.processes,
        "deepspeed": engine.deepspeed,
        "packages": {x: version(x) for x in PACKAGES if find_spec(x)}
        | {"python": platform.python_version()},
    }
    write_whole(run.settings, json.dumps(settings, indent=2, default=str) + "\n")
    for name in (*TOKENIZER_FILES, run.template.name):  # delete the files of an earlier launch
        (run.path / name).unlink(missing_ok=True)
    copy_tokenizer(data.tokenizer_path, run.path)
    if data.kind == CONVERSATIONS:
        run.template.write_text(f"{PLAIN_JINJA}\n", encoding="utf-8")


def changes_since_stop(
    start: StartingPoint, args: TrainingArguments, config: LMConfig, engine: Engine
) -> list[str]:
    """Return a line for each value (flag, engine, processes) that differs from a resumed run's
    settings.json, which still describes the previous launch."""
    settings = read_settings(start.folder.settings)
    old_flags = settings.get("arguments", {}) | settings.get("model", {})
    new_flags = vars(args) | config.to_dict()
    before = settings | {f"--{name}": value for name, value in old_flags.items()}
    now = {f"--{name}": value for name, value in new_flags.items()}
    now |= {"engine": engine.name, "processes": engine.processes}
    before |= {name: now[name] for name in ("--resume", "--run_name")}  # no effect on training
    return [
        f"changed since the run was stopped: {name} {before[name]} → {value}"
        for name, value in now.items()
        if start.checkpoint and before.get(name, value) != value
    ]
