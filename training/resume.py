"""Which run to write into, and which checkpoint of it to go on from."""

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import UsageError
from common.numbers import counted
from data.dataset import PackedDataset
from model import LMConfig
from report.history import read_rows
from runs.checkpoint import STATE, damage, newest_sound, read_state
from runs.find import program_of, run_to_resume
from runs.folder import RunFolder
from runs.lock import lock
from training.arguments import Arguments, TrainingArguments
from training.settings import changed_arguments, saved_arguments


@dataclass(frozen=True)
class StartingPoint:
    """A run folder, and the checkpoint to go on from if it is not a new run."""

    folder: RunFolder
    checkpoint: Path | None = None
    state: dict = field(default_factory=dict)  # state.json of the checkpoint

    @property
    def step(self) -> int:
        """The last one that the checkpoint has; 0 for a new run."""
        return self.state.get("step", 0)


def choose_run(args: TrainingArguments) -> StartingPoint:
    """Find or make the run folder and lock it.

    Raises UsageError: nothing to resume at the path given, a damaged checkpoint was named, a new
    run would fall on an old one, or another process writes there.
    """
    start = find_starting_point(args)
    try:
        start.folder.path.mkdir(parents=True, exist_ok=True)
        lock(start.folder.lock)
    except OSError as error:
        raise UsageError(f"the run folder cannot be used: {error}") from error
    return start


def find_starting_point(args: TrainingArguments, quiet: bool = False) -> StartingPoint:
    """What `choose_run` chooses; only reads, so that it can be asked before anything is launched.
    `quiet` says nothing of checkpoints that are missing or passed over. Raises UsageError: as
    `choose_run`, but for the lock."""
    try:
        if args.resume == "auto":
            return _newest(args, quiet) or _new_run(args, may_exist=True)
        if args.resume is not None:
            start = _named(Path(args.resume))
            _require_program(
                start.folder, args, "that goes on with it, in run_accelerate.sh by STAGE"
            )
            return start
        return _new_run(args, may_exist=False)
    except OSError as error:
        raise UsageError(f"the run folder cannot be used: {error}") from error


def starting_weights(args: TrainingArguments) -> str | None:
    """What names the model's shape and tokenizer: --init_from; of a run that goes on its own base
    or checkpoint, for those weights may be gone, and 'auto' may be another run by now. None: the
    model is drawn at random. Raises UsageError: as `find_starting_point`."""
    if args.init_from is None or args.resume is None:
        return args.init_from
    start = find_starting_point(args, quiet=True)
    if start.checkpoint is None:
        return args.init_from
    return str(start.folder.base if start.folder.base.exists() else start.checkpoint)


def with_own_teacher(args: Arguments) -> Arguments:
    """Of a run that goes on and is told of no teacher, with the one that it has had: 'auto' may be
    another one by now. Raises UsageError: as `find_starting_point`."""
    if args.teacher != "auto" or args.resume is None:
        return args
    start = find_starting_point(args, quiet=True)
    before = saved_arguments(start.folder) if start.checkpoint else {}
    own = before.get("teacher")
    return dataclasses.replace(args, teacher=own) if isinstance(own, str) else args


def _newest(args: TrainingArguments, quiet: bool) -> StartingPoint | None:
    """The newest sound checkpoint of the run named, or of the run that saved last."""
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
    """A run's newest checkpoint or a checkpoint itself; a damaged one is refused."""
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
    train_set: PackedDataset, args: TrainingArguments, processes: int, teacher: str | None = None
) -> dict:
    """What a run must have in common with the one it resumes, besides the model's shape; `teacher`
    is the hash of one's weights, if there is one."""
    identity = {
        "tokenizer": train_set.description["tokenizer_sha256"][:16],
        "data": train_set.identity,
        "global_batch": args.batch_size * args.accumulation_steps * processes,
        "seed": args.seed,
        "optimizer": args.optimizer,
    }
    return identity | ({"teacher": teacher[:16]} if teacher else {})


def resumed_arguments(
    start: StartingPoint,
    args: TrainingArguments,
    config: LMConfig,
    train_set: PackedDataset,
    processes: int,
    teacher: str | None = None,
) -> TrainingArguments:
    """The arguments with which this run equals the one that saved: on another number of processes,
    --accumulation_steps changes so that the global batch stays.

    Raises UsageError: another model, tokenizer, data set, global batch, seed, optimizer or teacher;
    lists the differences.
    """
    saved = start.state["identity"]
    current = run_identity(train_set, args, processes, teacher)
    if processes != start.state["processes"] and saved["global_batch"] != current["global_batch"]:
        steps, rest = divmod(saved["global_batch"], args.batch_size * processes)
        if rest or not steps:
            raise UsageError(
                f"the run's global batch of {saved['global_batch']} sequences cannot be made of "
                f"--batch_size {args.batch_size} on {processes} processes: choose a --batch_size "
                "that divides it"
            )
        args = dataclasses.replace(args, accumulation_steps=steps)
        current["global_batch"] = saved["global_batch"]
    saved = LMConfig.from_dict(start.state["model"]).shape() | saved
    if different := _explain(start, args, saved, config.shape() | current):
        raise UsageError(f"cannot resume {start.checkpoint}: {different}")
    return args


def differences(saved: dict, current: dict) -> list[str]:
    """Where two runs differ, one line each, for people."""
    return [
        f"{key}: {saved.get(key)} in the checkpoint, {current.get(key)} now"
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key) != current.get(key)
    ]


def _explain(start: StartingPoint, args: TrainingArguments, saved: dict, current: dict) -> str:
    """Where the run that saved and this one differ, and what to type instead; empty if nowhere."""
    lines = differences(saved, current)
    if not lines:
        return ""
    advice = []
    before, now = saved_arguments(start.folder).get("data"), args.data
    named = isinstance(before, str) and Path(before).resolve() != Path(now).resolve()
    if named and saved.get("data") != current.get("data"):
        # Two folders say more than two checksums; tokenizer and vocabulary come with the data.
        of_data = dict.fromkeys(("data", "tokenizer", "vocab_size"))
        others = differences(saved | of_data, current | of_data)
        lines = [f"data: {before} in the run, {now} now", *others]
        if not others:
            advice.append(f"--data {before} goes on with it")
    if saved.get("teacher") != current.get("teacher"):
        before = saved_arguments(start.folder)
        lines.append(f"the teacher was {before.get('teacher')}, and is {args.teacher} now")
    if saved["optimizer"] == "muon" != current["optimizer"]:
        advice.append("--optimizer muon goes on with it, under every engine but ZeRO-3 and offload")
    if not advice and start.folder.settings.exists():
        advice.append(f"the flags that go on with it stand in {start.folder.settings}")
    if args.resume == "auto":
        advice.append("--resume out/runs/NAME names another run")
    return "; ".join(lines + advice)


def say_what_changed(
    start: StartingPoint,
    asked: TrainingArguments,
    args: TrainingArguments,
    *,
    processes: int,
    engine: str,
) -> None:
    """What is other than when the run was stopped, asked for or not."""
    if args.accumulation_steps != asked.accumulation_steps:
        print(
            f"{counted(processes, 'processes')} instead of {start.state['processes']}: "
            f"--accumulation_steps is {args.accumulation_steps} now, the global batch stays",
            flush=True,
        )
    for line in changed_arguments(start.folder, args, engine):
        print(f"changed since the run was stopped: {line}", flush=True)


def describe_finished(start: StartingPoint, total_steps: int) -> str:
    return (
        f"{start.folder.path} is finished: {start.step} of {total_steps} steps; "
        "more --epochs or --max_steps would go on with it"
    )


def set_aside(start: StartingPoint) -> None:
    """Rename what belongs to a course not taken; for the main process, once the run does start.

    Checkpoints after the one resumed from (damaged ones, or the run goes back), and the weights of
    a run that was finished and is extended or goes back, under the last step that was logged. What
    says that it gave up is deleted.
    """
    run, aside = start.folder, f".aside-{int(time.time())}"
    if run.weights.exists():
        last = max((row["step"] for row in read_rows(run.metrics)), default=start.step)
        kept = run.path / f"weights-step-{last:08d}"
        run.weights.rename(kept.with_name(kept.name + aside) if kept.exists() else kept)
    for path in run.all_checkpoints():
        if int(path.name[5:]) > start.step:
            path.rename(path.with_name(path.name + aside))
            print(f"set aside {path}: the run goes on from step {start.step}", flush=True)
    run.bad_samples.unlink(missing_ok=True)
