"""Which run folder to write into, and which of its checkpoints to go on from."""

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import UsageError
from common.numbers import counted
from data.dataset import TokenStream
from model import LMConfig
from report.history import read_rows
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
    try:
        if args.resume == "auto":
            return _newest(args, quiet) or _new_run(args, may_exist=True)
        if args.resume is None:
            return _new_run(args, may_exist=False)
        start = _named(Path(args.resume))
        _require_program(start.folder, args, "that goes on with it, in run_accelerate.sh by STAGE")
        return start
    except OSError as error:
        raise UsageError(f"the run folder cannot be used: {error}") from error


def claim(start: StartingPoint) -> None:
    """Make the run folder and lock it. Raises UsageError: another process writes there, or the
    system refuses."""
    try:
        start.folder.path.mkdir(parents=True, exist_ok=True)
        lock(start.folder.lock)
    except OSError as error:
        raise UsageError(f"the run folder cannot be used: {error}") from error


def starting_weights(args: TrainingArguments, start: StartingPoint) -> str | None:
    """Return the weights that give the model's shape and tokenizer; None: drawn at random.

    A run that goes on has its own base or checkpoint: the weights of --init_from may be gone, and
    'auto' may be another run by now.
    """
    if args.init_from is None or start.checkpoint is None:
        return args.init_from
    return str(start.folder.base if start.folder.base.exists() else start.checkpoint)


def with_own_teacher(args: TrainingArguments, start: StartingPoint) -> TrainingArguments:
    """Return the arguments of a run that goes on with the teacher that it had, where --teacher is
    'auto': the newest run may be another one by now."""
    own = saved_arguments(start.folder).get("teacher") if start.checkpoint else None
    named = args.teacher == "auto" and isinstance(own, str)
    return dataclasses.replace(args, teacher=own) if named else args


def _newest(args: TrainingArguments, quiet: bool) -> StartingPoint | None:
    """Return the newest sound checkpoint of the run named, or of the run that saved last."""
    out = Path(args.out_dir)
    run = run_to_resume(out, args.program, args.run_name)
    if run is None:
        where = out / args.run_name if args.run_name else out
        if not quiet:
            print(f"--resume auto: no checkpoint in {where}, a new run starts", flush=True)
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
        sound, _ = newest_sound(run)
        advice = f"the newest sound one is {sound}" if sound else "no other is sound"
        raise UsageError(f"checkpoint {checkpoint} is damaged: {problem}; {advice}")
    return StartingPoint(run, checkpoint, read_state(checkpoint))


def _require_program(run: RunFolder, args: TrainingArguments, otherwise: str) -> None:
    if run.settings.exists() and (program := program_of(run)) != args.program:
        raise UsageError(f"{run.path} holds a run of {program}: {otherwise}")


def _new_run(args: TrainingArguments, may_exist: bool) -> StartingPoint:
    run = RunFolder(Path(args.out_dir) / (args.run_name or time.strftime("%Y%m%d-%H%M%S")))
    _require_program(run, args, "choose another run_name")
    if run.metrics.exists() and not may_exist:
        raise UsageError(
            f"{run.path} holds a run: pass --resume auto to go on with it, or another run_name"
        )
    return StartingPoint(run)


def run_identity(
    train_set: TokenStream, args: TrainingArguments, processes: int, teacher: str | None
) -> dict:
    """Return what a run must have in common with the run that it resumes, besides the model's
    shape.

    Args:
        teacher: hash of the teacher's weights, if there is a teacher.
    """
    identity = {
        "tokenizer": train_set.description["tokenizer_sha256"][:16],
        "data": train_set.identity,
        "global_batch": args.global_batch(processes),
        "seed": args.seed,
        "optimizer": args.optimizer,
    }
    return identity | ({"teacher": teacher[:16]} if teacher else {})


def resumed_arguments(
    start: StartingPoint, args: TrainingArguments, config: LMConfig, identity: dict, processes: int
) -> tuple[TrainingArguments, dict]:
    """Return the arguments and the identity with which this run equals the run that saved: on
    another number of processes --accumulation_steps changes, so that the global batch stays.

    Raises UsageError: another model, tokenizer, data set, global batch, seed, optimizer or teacher;
    lists the differences.
    """
    saved = start.state["identity"]
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
    saved = LMConfig.from_dict(start.state["model"]).shape() | saved
    if lines := _differences(start, args, saved, config.shape() | identity):
        raise UsageError(f"cannot resume {start.checkpoint}: {'; '.join(lines)}")
    return args, identity


def _differences(
    start: StartingPoint, args: TrainingArguments, saved: dict, current: dict
) -> list[str]:
    """Return where two runs differ, and what to type instead; empty if they are the same."""
    before = saved_arguments(start.folder)
    different = [k for k in sorted(saved | current) if saved.get(k) != current.get(k)]
    lines, advice = [], [f"the flags that go on with it stand in {start.folder.settings}"]
    for key in different:
        there, now = saved.get(key), current.get(key)
        if key in ("data", "teacher") and before.get(key):  # paths say more than checksums
            there, now = f"{before[key]} ({there})", f"{getattr(args, key)} ({now})"
        lines.append(f"{key}: {there} in the checkpoint, {now} now")
    if "data" in different and before.get("data"):
        advice = [f"--data {before['data']} goes on with it"]
    if "optimizer" in different and saved["optimizer"] == "muon":
        advice = ["--optimizer muon goes on with it, under every engine but ZeRO-3 and offload"]
    if args.resume == "auto":
        advice.append("--resume out/runs/NAME names another run")
    return [*lines, *advice] if lines else []


def say_what_changed(
    start: StartingPoint,
    asked: TrainingArguments,
    args: TrainingArguments,
    *,
    processes: int,
    engine: str,
) -> None:
    """Print what differs from the run when it was stopped, asked for or not."""
    if args.accumulation_steps != asked.accumulation_steps:
        print(
            f"{counted(processes, 'processes')} instead of {start.state['processes']}: "
            f"--accumulation_steps is {args.accumulation_steps} now, the global batch stays",
            flush=True,
        )
    for line in changed_arguments(start.folder, args, engine):
        print(f"changed since the run was stopped: {line}", flush=True)


def set_aside(start: StartingPoint) -> None:
    """Rename files of the steps that are trained again; the main process does it at the start.

    They are checkpoints after the one that is resumed (damaged ones, or the run goes back), and the
    weights of a finished run, which get the last logged step as their name. The record of a run
    that gave up is deleted.
    """
    run, aside = start.folder, f".aside-{int(time.time())}"
    if run.weights.exists():
        last = max((row["step"] for row in read_rows(run.metrics)), default=start.step)
        kept = run.path / f"weights-step-{last:08d}"
        run.weights.rename(kept.with_name(kept.name + aside) if kept.exists() else kept)
    for path in run.all_checkpoints():
        if step_of(path) > start.step:
            path.rename(path.with_name(path.name + aside))
            print(f"set aside {path}: the run goes on from step {start.step}", flush=True)
    run.bad_samples.unlink(missing_ok=True)
