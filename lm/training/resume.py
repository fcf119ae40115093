"""Choose the run folder and the checkpoint to resume from; write the run's settings.json."""

import json
import platform
import sys
import time
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from lm.common.atomic import write_whole
from lm.common.errors import UsageError
from lm.common.numbers import available_cores
from lm.data.chat_template import PLAIN_JINJA
from lm.data.dataset import TokenStream
from lm.data.prepare import PackingOptions, describe_sources
from lm.data.shards import CONVERSATIONS, read_description
from lm.data.tokenizer import TOKENIZER_FILES, copy_tokenizer
from lm.engine.engine import Engine
from lm.engine.hardware import processes_here, user_sets_threads
from lm.engine.launcher_settings import with_launcher_settings
from lm.storage.checkpoint import STATE, newest_undamaged, read_state, run_of
from lm.storage.find import program_of, run_to_resume
from lm.storage.folder import RunFolder, claim, read_settings, step_of
from lm.training.arguments import TrainingArguments, as_arguments, flags_of
from model import LMConfig, Transformer

# Flags that a resumed run does not take over: those of a launch.
OF_LAUNCH = {"resume", "run_name", "out_dir", "deepspeed", "time_limit", "model"}
# A typed flag → the flag that it replaces. Both decide the same.
REPLACES = {"epochs": "max_steps", "warmup_fraction": "warmup_steps"}
REPLACES |= {"data": "conversations", "conversations": "data"}
PACKAGES = ("torch", "accelerate", "deepspeed", "numpy", "sentencepiece")


@dataclass(frozen=True)
class StartingPoint:
    """The run folder to write to, and the checkpoint to resume from."""

    folder: RunFolder
    checkpoint: Path | None = None  # None: a new run
    state: dict = field(default_factory=dict)  # state.json of the checkpoint; {} for a new run

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
        return StartingPoint(run, newest, read_state(newest))
    if problems:
        reason = f"no undamaged checkpoint, {path} is damaged: {problem}"
        raise UsageError(f"--resume {args.resume}: {reason}")
    if args.resume:
        searched = Path(args.out_dir, args.run_name or "")
        print(f"--resume auto: no checkpoint in {searched}, a new run starts")
    return StartingPoint(run)


def find_folder(args: TrainingArguments, claims: bool = False) -> tuple[RunFolder, list[Path]]:
    """Return the run folder and, for --resume, its checkpoints, which are not read.
    Raises UsageError if the path has no checkpoint, or another run is there."""
    out = Path(args.out_dir)
    run = new = RunFolder(out / (args.run_name or time.strftime("%Y%m%d-%H%M%S")))
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
    if run is new and not args.run_name:  # `claim_new` finds a name that no other run has
        return run, []
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
    return run, checkpoints


def decided_arguments(
    typed: dict, kind: type[TrainingArguments] = TrainingArguments
) -> tuple[TrainingArguments, dict]:
    """Return training arguments and model settings. A typed flag decides, then the launcher, then
    the run that --resume continues (see `saved_flags`), then the default."""
    if typed.get("teacher") == "auto":  # the default, unless a run has its own teacher
        typed = {name: value for name, value in typed.items() if name != "teacher"}
    return as_arguments(with_launcher_settings(typed, saved=saved_flags(typed, kind)), kind)


def saved_flags(typed: dict, kind: type[TrainingArguments]) -> dict:
    """Return the flags that a resumed run takes over from its settings.json, unless they are typed:
    those that do not belong to a launch, and are known. Return {} for a new run. Raises UsageError
    as `find_folder` does."""
    if not typed.get("resume"):
        return {}
    run, checkpoints = find_folder(kind(**{x: typed[x] for x in OF_LAUNCH & typed.keys()}))
    settings = read_settings(run.settings)
    if not (checkpoints and settings):
        return {}
    saved = settings.get("model", {}) | settings.get("arguments", {})
    known = {item.name for of in (kind, LMConfig) for item, _ in flags_of(of)}
    gone = OF_LAUNCH | {REPLACES[name] for name in REPLACES.keys() & typed.keys()}
    if not Path(saved.get("data") or "").exists():
        gone.add("data")  # it is prepared or named again
    fits = settings.get("processes_per_machine") == processes_here()
    if user_sets_threads() or not fits or saved.get("threads", 0) > available_cores():
        gone.add("threads")
    # The name prevents that a later search finds another run, which has saved in the meantime.
    saved = {k: v for k, v in saved.items() if k in known - gone and v is not None}
    return saved | {"run_name": run.path.name, "out_dir": str(run.path.parent)}


def require_text_of_run(named: str, files: list[str], folder: Path, data: str, run: Path) -> None:
    """Raise UsageError unless `data`, the prepared data of a resumed run, is that of these files:
    it is never replaced. `named` are the settings that name the files, `folder` is where they are
    prepared."""
    then = read_description(Path(data)).get("prepared_from", {})
    now = describe_sources(files, PackingOptions(None, None, 1, False))
    same = (now[key] == then.get(key) for key in ("files", "bytes_on_disk"))
    if folder.resolve() != Path(data).resolve() or not all(same):
        raise UsageError(
            f"{named}: not what {run} was trained on; its data stays in {data}. To go on with it, "
            f"pass --data {data} instead. To train on other data, start a new run with --init_from "
            f"{run}, in pretraining also with PREPARE_FLAGS='--tokenizer {data}'"
        )


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


def settings_of(args: TrainingArguments, config: LMConfig, engine: Engine) -> dict:
    """Return the content of settings.json."""
    settings = {
        "program": args.program,
        "started": time.time(),  # decides which run `auto` is; see lm/storage/find.py
        "command": sys.argv,
        "arguments": vars(args),
        "model": config.to_dict(),
        "engine": engine.name,
        "processes": engine.processes,
        "processes_per_machine": processes_here(),
        "deepspeed": engine.deepspeed,
        "packages": {x: version(x) for x in PACKAGES if find_spec(x)}
        | {"python": platform.python_version()},
    }
    return json.loads(json.dumps(settings, default=str))


def write_settings(run: RunFolder, settings: dict, data: TokenStream) -> None:
    """Write settings.json and the tokenizer; for conversations, the chat template too."""
    write_whole(run.settings, json.dumps(settings, indent=2) + "\n")
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
    for name in ("--resume", "--run_name", "--out_dir"):  # no effect on training
        before[name] = now[name]
    return [
        f"changed since the run was stopped: {name} {before[name]} → {value}"
        for name, value in now.items()
        if start.checkpoint and before.get(name, value) != value
    ]
