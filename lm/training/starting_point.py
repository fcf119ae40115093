"""Choose the run folder and the checkpoint to resume from; write settings.json."""

import json
import platform
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from lm.common.atomic import write_whole
from lm.common.errors import UsageError
from lm.data.chat_template import PLAIN_JINJA
from lm.data.dataset import TokenStream
from lm.data.shards import CONVERSATIONS
from lm.data.tokenizer import TOKENIZER_FILES, copy_tokenizer
from lm.engine.engine import Engine
from lm.engine.hardware import processes_here
from lm.storage.checkpoint import checkpoints_at, newest_undamaged, read_state, run_of
from lm.storage.find import newest, program_of
from lm.storage.folder import RunFolder, claim, step_of
from lm.training.arguments import TrainingArguments
from model import LMConfig

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


def find_starting_points(
    models: list[TrainingArguments], claims: bool = False
) -> list[StartingPoint]:
    """Find each run's folder and, for --resume, the named checkpoint or those of the newest step
    that is undamaged in all runs. With `claims`, lock existing folders first: a run that is ending
    may save another checkpoint. Raises UsageError as `find_folder` and `newest_undamaged` do."""
    folders, checkpoints = zip(*(find_folder(args, claims) for args in models), strict=True)
    if paths := newest_undamaged(*checkpoints):
        pairs = zip(folders, paths, strict=True)
        return [StartingPoint(run, path, read_state(path)) for run, path in pairs]
    for args in models:
        if args.resume:
            searched = Path(args.out_dir, args.run_name or "")
            print(f"--resume auto: no checkpoint in {searched}, a new run starts")
    return [StartingPoint(run) for run in folders]


def find_folder(args: TrainingArguments, claims: bool = False) -> tuple[RunFolder, list[Path]]:
    """Return the run folder and, for --resume, its checkpoints, which are not read.
    Raises UsageError if the path has no checkpoint, or another run is there."""
    out = Path(args.out_dir)
    run = new = RunFolder(out / (args.run_name or time.strftime("%Y%m%d-%H%M%S")))
    named = None if args.resume in (None, "auto") else Path(args.resume).resolve()
    if args.resume == "auto":
        runs = [run.path] if args.run_name else out.glob("*")
        run = newest(runs, args.program, RunFolder.all_checkpoints) or run
    elif named:
        if not (saved := checkpoints_at(named)):
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
    return run, checkpoints_at(named or run.path) if args.resume else []


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
