"""Which run folder to write into, and which of its checkpoints to go on from."""

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import UsageError
from data.dataset import TokenStream
from model import LMConfig, Transformer
from runs.checkpoint import STATE, damage, newest_sound, read_state
from runs.find import program_of, run_to_resume
from runs.folder import RunFolder, lock, step_of
from training.arguments import TrainingArguments
from training.settings import changed_arguments, saved_arguments


@dataclass(frozen=True)
class StartingPoint:
    """A run folder, and the checkpoint to go on from if it is not a new run."""

    folder: RunFolder
    checkpoint: Path | None = None
    state: dict = field(default_factory=dict)  # state.json of the checkpoint

    @property
    def step(self) -> int:
        """The last step that was trained; 0 for a new run."""
        return self.state.get("step", 0)


def find_starting_point(args: TrainingArguments, quiet: bool = False) -> StartingPoint:
    """Find the run folder, and its checkpoint if --resume asks for one; nothing is written.

    Args:
        quiet: say nothing of checkpoints that are missing or damaged.

    Raises UsageError: nothing to resume at the path given, a damaged checkpoint was named, or a new
    run would fall on an old one.
    """
    name = args.run_name or time.strftime("%Y%m%d-%H%M%S")
    start = None
    if args.resume == "auto":
        start = _newest(args, quiet)
    elif args.resume:
        start = _named(Path(args.resume))
    start = start or StartingPoint(RunFolder(Path(args.out_dir) / name))
    run = start.folder
    if run.settings.exists() and (program := program_of(run)) != args.program:
        raise UsageError(
            f"{run.path} holds a run of {program}: choose another run_name, or that program (in "
            "run_accelerate.sh by STAGE)"
        )
    if run.metrics.exists() and not args.resume:
        raise UsageError(f"{run.path} holds a run: pass --resume auto, or another run_name")
    return start


def _newest(args: TrainingArguments, quiet: bool) -> StartingPoint | None:
    """Return the newest sound checkpoint of the run named, or of the run that saved last."""
    out = Path(args.out_dir)
    run = run_to_resume(out, args.program, args.run_name)
    if run is None:
        if not quiet:
            print(
                f"--resume auto: no checkpoint in {out / (args.run_name or '')}, a new run starts"
            )
        return None
    sound, problems = newest_sound(run)
    for path, problem in problems.items():
        if not quiet:
            print(f"DAMAGED CHECKPOINT {path}: {problem}; trying the one before", flush=True)
    if sound is None:
        raise UsageError(f"every checkpoint of {run.path} is damaged; a new --run_name starts anew")
    return StartingPoint(run, sound, read_state(sound))


def _named(path: Path) -> StartingPoint:
    """Return a run's newest checkpoint, or the checkpoint that was named; refuse a damaged one."""
    checkpoints = RunFolder(path).all_checkpoints()
    checkpoint = (checkpoints[-1] if checkpoints else path).resolve()
    if not (checkpoint / STATE).is_file() and not checkpoints:
        raise UsageError(f"--resume {path}: neither a run with checkpoints nor a checkpoint")
    path, here = checkpoint.parent.parent, Path.cwd()
    run = RunFolder(path.relative_to(here) if here in path.parents else path)  # as --out_dir is
    checkpoint = run.path / checkpoint.parent.name / checkpoint.name
    if problem := damage(checkpoint):
        advice = "--resume auto takes the newest sound one"
        raise UsageError(f"checkpoint {checkpoint} is damaged: {problem}; {advice}")
    return StartingPoint(run, checkpoint, read_state(checkpoint))


def claim(start: StartingPoint) -> None:
    """Make the run folder and lock it. Raises UsageError: another process writes there, or the
    system refuses."""
    try:
        start.folder.path.mkdir(parents=True, exist_ok=True)
        lock(start.folder.lock)
    except OSError as error:
        raise UsageError(f"the run folder cannot be used: {error}") from error


def with_own_weights(args: TrainingArguments, start: StartingPoint) -> TrainingArguments:
    """Return the arguments by which a run that goes on finds its own shape, tokenizer and teacher:
    the weights of --init_from may be gone, and 'auto' may be another run by now."""
    own = {}
    if start.checkpoint and args.init_from:
        own["init_from"] = str(
            start.folder.base if start.folder.base.exists() else start.checkpoint
        )
    if start.checkpoint and args.teacher == "auto":
        own["teacher"] = saved_arguments(start.folder).get("teacher", "auto")
    return dataclasses.replace(args, **own)


def run_identity(
    train_set: TokenStream, args: TrainingArguments, processes: int, teacher: str | None
) -> dict:
    """Return what a run must have in common with the run that it resumes, besides the model;
    `teacher` is the hash of the teacher's weights."""
    identity = {
        "tokenizer": train_set.description["tokenizer_sha256"][:16],
        "data": train_set.identity,
        "global_batch": args.global_batch(processes),
        "seed": args.seed,
        "optimizer": args.optimizer,
    }
    return identity | ({"teacher": teacher[:16]} if teacher else {})


def resumed_arguments(
    start: StartingPoint,
    args: TrainingArguments,
    shapes: Transformer,
    identity: dict,
    processes: int,
) -> tuple[TrainingArguments, dict]:
    """Return the arguments and the identity with which this run equals the run that saved: on
    another number of processes --accumulation_steps changes, so that the global batch stays.

    Raises UsageError: another model, adapters, tokenizer, data set, global batch, seed, optimizer
    or teacher; lists the differences.
    """
    saved = LMConfig.from_dict(start.state["model"]).shape() | start.state["identity"]
    batch = saved["global_batch"]
    if processes != start.state["processes"] and batch != identity["global_batch"]:
        steps, rest = divmod(batch, args.batch_size * processes)
        if rest or not steps:
            raise UsageError(
                f"the run's global batch of {batch} sequences cannot be made of "
                f"--batch_size {args.batch_size} on {processes} processes: choose a --batch_size "
                "that divides it"
            )
        args = dataclasses.replace(args, accumulation_steps=steps)
        identity = identity | {"global_batch": batch}
    saved["lora"] = start.state.get("lora")
    now = shapes.config.shape() | identity | {"lora": shapes.lora and vars(shapes.lora)}
    different = [
        f"{key}: {saved.get(key)} in the checkpoint, {now.get(key)} now"
        for key in sorted(saved | now)
        if saved.get(key) != now.get(key)
    ]
    if different:
        raise UsageError(
            f"cannot resume {start.checkpoint}: {'; '.join(different)}; the flags that go on with "
            f"it stand in {start.folder.settings}"
        )
    return args, identity


def say_what_changed(
    start: StartingPoint, args: TrainingArguments, *, processes: int, engine: str
) -> None:
    """Print what differs from the run when it was stopped."""
    lines = changed_arguments(start.folder, args, engine)
    if processes != start.state["processes"]:
        lines.append(f"processes {start.state['processes']} → {processes}, the global batch stays")
    for line in lines:
        print(f"changed since the run was stopped: {line}", flush=True)


def set_aside(start: StartingPoint) -> None:
    """Rename what a run goes back behind: later or damaged checkpoints, and the weights of a
    finished run. The main process does it at the start."""
    run = start.folder
    old = [path for path in run.all_checkpoints() if step_of(path) > start.step]
    for path in [*old, run.weights]:
        if path.exists():
            path.rename(f"{path}.aside-{int(time.time())}")
            print(f"set aside {path}: the run goes on from step {start.step}", flush=True)
