"""Which run to write into, and which checkpoint of it to go on from."""

import hashlib
import json
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from accelerate import Accelerator

from data.dataset import PackedDataset
from data.order import MicroBatchSampler
from model import LMConfig
from training.agreement import on_main_process
from training.arguments import TrainingArguments
from training.checkpoint import damage, differences, read_state
from training.engine import Engine
from training.errors import UsageError
from training.lock import RunLock
from training.run_folder import RunFolder


@dataclass
class Choice:
    """The answer, the same on every process."""

    folder: RunFolder
    checkpoint: Path | None = None
    state: dict = field(default_factory=dict)  # state.json of the checkpoint
    new_weights: str = "scratch"  # without one, where the weights come from, in words

    @property
    def step(self) -> int:
        return self.state.get("step", 0)


def choose_run(args: TrainingArguments, accelerator: Accelerator) -> Choice:
    """Find or make the run folder and lock it.

    Raises:
        UsageError: nothing to resume at the path given, a damaged checkpoint was named, a new run
            would fall on an old one, or another process writes there.
    """

    def choose() -> Choice:
        choice = find_run(args)
        path = choice.folder.path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the run folder {path}: {error.strerror}") from error
        try:
            RunLock(choice.folder.lock)
        except OSError as error:
            raise UsageError(f"the run folder cannot be used: {error}") from error
        return choice

    return on_main_process(accelerator, choose)


def find_run(args: TrainingArguments, quiet: bool = False) -> Choice:
    """What `choose_run` chooses; only reads, so that it can be asked before anything is launched.

    Args:
        quiet: say nothing of checkpoints that are missing or passed over.

    Raises:
        UsageError: as `choose_run`, but for the lock.
    """
    try:
        if args.resume == "auto":
            return _newest(args, quiet) or _new_run(args, may_exist=True)
        if args.resume is not None:
            return _named(Path(args.resume))
        return _new_run(args, may_exist=False)
    except OSError as error:
        raise UsageError(f"the run folder cannot be used: {error}") from error


def _newest(args: TrainingArguments, quiet: bool) -> Choice | None:
    """The newest sound checkpoint of the run named, or of the run that saved last."""
    out = Path(args.out_dir)
    runs = [out / args.run_name] if args.run_name else list(out.glob("*"))
    saved = [run for run in map(RunFolder, runs) if run.all_checkpoints()]
    if not saved:
        where = runs[0] if args.run_name else out
        if not quiet:
            print(f"--resume auto: no checkpoint in {where}, a new run starts", flush=True)
        return None
    run = max(saved, key=lambda run: run.all_checkpoints()[-1].stat().st_mtime)
    sound = _newest_sound(run, quiet)
    if sound is None:
        raise UsageError(f"every checkpoint of {run.path} is damaged; a new --run_name starts anew")
    return Choice(run, sound, read_state(sound))


def _newest_sound(run: RunFolder, quiet: bool) -> Path | None:
    for checkpoint in reversed(run.all_checkpoints()):
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint
        if not quiet:
            print(f"DAMAGED CHECKPOINT {checkpoint}: {problem}; trying the one before", flush=True)
    return None


def _named(path: Path) -> Choice:
    """A run's newest checkpoint or a checkpoint itself; a damaged one is refused."""
    checkpoints = RunFolder(path).all_checkpoints()
    checkpoint = (checkpoints[-1] if checkpoints else path).resolve()
    if not (checkpoint / "state.json").is_file() and not checkpoints:
        raise UsageError(f"--resume {path}: neither a run with checkpoints nor a checkpoint")
    run = RunFolder(_from_here(checkpoint.parent.parent))
    checkpoint = run.path / checkpoint.parent.name / checkpoint.name
    if problem := damage(checkpoint):
        sound = _newest_sound(run, quiet=True)
        advice = f"the newest sound one is {sound}" if sound else "no other is sound"
        raise UsageError(f"checkpoint {checkpoint} is damaged: {problem}; {advice}")
    return Choice(run, checkpoint, read_state(checkpoint))


def _from_here(path: Path) -> Path:
    """An absolute path, relative where it is inside the working folder, as --out_dir gives it."""
    here = Path.cwd()
    return path.relative_to(here) if here in path.parents else path


def _new_run(args: TrainingArguments, may_exist: bool) -> Choice:
    run = RunFolder(Path(args.out_dir) / (args.run_name or time.strftime("%Y%m%d-%H%M%S")))
    if run.metrics.exists() and not may_exist:
        raise UsageError(
            f"{run.path} holds a run already: pass --resume auto to go on with it, "
            "or another --run_name"
        )
    return Choice(run)


def set_aside(choice: Choice) -> None:
    """Rename what belongs to a course not taken; for the main process, once the run does start.

    Checkpoints after the one resumed from (damaged ones, or the run goes back), and the weights of
    a run that was finished and is extended.
    """
    if choice.folder.weights.exists():
        choice.folder.weights.rename(choice.folder.path / f"weights-step-{choice.step:08d}")
    for path in choice.folder.all_checkpoints():
        if int(path.name[5:]) > choice.step:
            path.rename(path.with_name(f"{path.name}.aside-{int(time.time())}"))
            print(f"set aside {path}: the run goes on from step {choice.step}", flush=True)


def reconcile(choice: Choice, engine: Engine, args: TrainingArguments, identity: dict) -> None:
    """Make the run that resumes equal to the one that saved, or say why it cannot be.

    With another number of processes, --accumulation_steps changes so that the global batch stays.

    Raises:
        UsageError: another model, tokenizer, data set, global batch or optimizer; lists the
            differences.
    """
    processes = engine.accelerator.num_processes
    steps = compare(choice, args, identity, processes)
    if steps != args.accumulation_steps:
        args.accumulation_steps = steps
        engine.set_accumulation(steps)
        identity["global_batch"] = args.batch_size * steps * processes
        if engine.accelerator.is_main_process:
            print(
                f"{processes} processes instead of {choice.state['processes']}: "
                f"--accumulation_steps is {steps} now, the global batch stays",
                flush=True,
            )
    if engine.accelerator.is_main_process:
        for line in changed_arguments(choice.folder, args):
            print(f"changed since the run was stopped: {line}", flush=True)


def compare(choice: Choice, args: TrainingArguments, identity: dict, processes: int) -> int:
    """--accumulation_steps with which this run, on so many processes, equals the one that saved.

    Raises:
        UsageError: see `reconcile`.
    """
    saved = {"optimizer": "adamw"} | choice.state["identity"]  # once there was no other
    steps = args.accumulation_steps
    if processes != choice.state["processes"] and saved["global_batch"] != identity["global_batch"]:
        steps, rest = divmod(saved["global_batch"], args.batch_size * processes)
        if rest or not steps:
            raise UsageError(
                f"the run's global batch of {saved['global_batch']} sequences cannot be made of "
                f"--batch_size {args.batch_size} on {processes} processes: choose a --batch_size "
                "that divides it"
            )
        identity = identity | {"global_batch": saved["global_batch"]}
    if different := _explain(choice, args, saved, identity):
        raise UsageError(f"cannot resume {choice.checkpoint}: {different}")
    return steps


def _explain(choice: Choice, args: TrainingArguments, saved: dict, identity: dict) -> str:
    """Where the run that saved and this one differ, and what to type instead; empty if nowhere."""
    lines = differences(saved, identity)
    if not lines:
        return ""
    advice = []
    before, now = _saved_arguments(choice.folder).get("data"), args.data
    named = isinstance(before, str) and Path(before).resolve() != Path(now).resolve()
    if named and saved.get("data") != identity.get("data"):
        # Two folders say more than two checksums; tokenizer and vocabulary come with the data.
        of_data = dict.fromkeys(("data", "tokenizer", "vocab_size"))
        others = differences(saved | of_data, identity | of_data)
        lines = [f"data: {before} in the run, {now} now", *others]
        if not others:
            advice.append(f"--data {before} goes on with it")
    if args.resume == "auto":
        advice.append("--resume out/runs/NAME names another run")
    return "; ".join(lines + advice)


def changed_arguments(folder: RunFolder, args: TrainingArguments) -> list[str]:
    """Flags of training that differ from those in the run's settings.json."""
    before, now = _saved_arguments(folder), vars(args)
    names = [item.name for item in fields(args) if item.name not in ("resume", "run_name")]
    return [
        f"--{name} {before[name]} → {now[name]}"
        for name in names
        if name in before and before[name] != now[name]
    ]


def _saved_arguments(folder: RunFolder) -> dict:
    """The flags in the run's settings.json; none where it is missing or unreadable."""
    try:
        arguments = json.loads(folder.settings.read_text(encoding="utf-8"))["arguments"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def describe_finished(choice: Choice, total_steps: int) -> str:
    return (
        f"{choice.folder.path} is finished: {choice.step} of {total_steps} steps; "
        "more --epochs or --max_steps would go on with it"
    )


def run_identity(
    config: LMConfig, train_set: PackedDataset, args: TrainingArguments, processes: int
) -> dict:
    """What a run must have in common with the one it resumes."""
    description = train_set.description
    shards = [shard["sha256"] for shard in description["splits"]["train"]["shards"]]
    # These change how something is computed, but not what is learned or from what.
    free = ("use_flash_attn", "dropout")
    return {
        **{key: value for key, value in config.to_dict().items() if key not in free},
        "tokenizer": description["tokenizer_sha256"][:16],
        "data": hashlib.sha256("".join(shards).encode()).hexdigest()[:16],
        "global_batch": args.batch_size * args.accumulation_steps * processes,
        "seed": args.seed,
        "optimizer": args.optimizer,
    }


def describe_bad_steps(
    count: int, step: int, sampler: MicroBatchSampler, samples: int, list_to: Path | None
) -> str:
    """Why a run with nothing but non-finite gradients stops, and what it was reading.

    The whole batch is written to the file `list_to`, by the one process that gives it.
    """
    last = sampler.indices(np.arange((step - 1) * samples, step * samples)).tolist()
    if list_to is not None:
        list_to.write_text(json.dumps({"step": step, "samples": last}) + "\n", encoding="utf-8")
    shown = ", ".join(map(str, last[:16])) + (", ..." if len(last) > 16 else "")
    return (
        f"{count} steps in a row had a non-finite gradient and changed nothing; the batch of step "
        f"{step} was samples {shown} (all in the run's bad_samples.json); the last checkpoint is "
        "as it was: try a lower --learning_rate"
    )
