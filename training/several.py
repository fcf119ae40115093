"""Several runs side by side on the same batches: what train_several_accelerate.py works on.

Every run has an engine, random numbers and a folder of its own, and reads the same samples,
because their order depends on the seed alone. The runs take turns in each step. They save at the
same steps, so that all of them can go on from a step that all have.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from common.errors import UsageError
from common.numbers import columns
from report.history import read_history
from report.page import UNKNOWN, final_numbers, leave_report
from runs.checkpoint import damage
from runs.folder import RunFolder, step_of
from training.arguments import TrainingArguments, as_arguments, build_parser
from training.build import random_state, restore_random
from training.engine.launch import Engine, build_engines
from training.engine.main_process import on_main_process
from training.interruption import StopRequest, end_stopped, how_to_resume
from training.log import require_trackers
from training.prepare import prepare
from training.run import Run
from training.start import settle, start_run

PROGRAM = "train_several_accelerate.py"
ABOUT = "Pretrain several small Llama-like models side by side, on the same batches."
# Flags in which models may differ, besides the shape. All others are about the batches, the
# process, or the steps at which something is done for all.
OWN = {
    *("run_name", "init_from", "deepspeed", "compile", "gradient_checkpointing"),
    *("optimizer", "learning_rate", "muon_learning_rate", "lr_schedule", "warmup_steps"),
    *("min_lr_ratio", "decay_fraction", "weight_decay", "beta1", "beta2", "muon_momentum"),
    *("grad_clip", "max_bad_steps", "sample_prompt", "sample_tokens"),
}
SUMMARY = (
    *("training loss", "validation loss", "best validation loss", "bits per byte"),
    *("tokens per second", "training time"),
)


class Model(NamedTuple):
    args: TrainingArguments
    settings: dict  # of its shape, those that were given


def parse_models(argv: list[str] | None = None) -> list[Model]:
    """Return what each --model is to be trained with: the flags of the command line, then those of
    its file.

    Raises UsageError, ConfigError: unknown flags, values that cannot work, or models that cannot be
    trained together.
    """
    parser = build_parser()
    parser.prog, parser.description = f"python {PROGRAM}", ABOUT
    parser.add_argument_group("models").add_argument(
        "--model",
        action="append",
        required=True,
        metavar="FILE",
        help="a JSON file with flags of one model, without dashes, such as "
        '{"dim": 256, "learning_rate": 1e-3, "deepspeed": "configs/zero3.json"}; once for each '
        "model; run_name is the file's name unless it is given there",
    )
    shared = vars(parser.parse_args(argv))
    files = shared.pop("model")
    models = [_read(file, shared) for file in files]
    first, names = models[0].args, [model.args.run_name for model in models]
    for refused, said in (
        ("run_name" in shared, '--run_name: each model has one of its own, "run_name" in its file'),
        (len({*names}) < len(names), f"two models have the same run_name, of {', '.join(names)}"),
        (first.resume not in (None, "auto"), "several models take --resume auto, from one step"),
        (first.keep_last == 1, "--keep_last 1: several models need 2, one may be behind"),
        (set(first.trackers) - {"tensorboard"}, "several models take tensorboard or none"),
    ):
        if refused:
            raise UsageError(said)
    for name in (item.name for item in fields(first) if item.name not in OWN):
        values = [getattr(model.args, name) for model in models]
        if any(value != values[0] for value in values):
            raise UsageError(f"--{name} must be the same for all models, not {values}")
    return models


def _read(file: str, shared: dict) -> Model:
    """Read a model's file; `shared` are the flags of the command line. Raises UsageError."""
    try:
        flags = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(flags, dict):
            raise ValueError('needs flags and their values in braces, such as {"dim": 128}')
        own = vars(build_parser().parse_args([_word(*flag) for flag in flags.items()]))
        return Model(*as_arguments(shared | {"run_name": Path(file).stem} | own))
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {file}: {error}") from error


def _word(name: str, value: str | float | bool) -> str:
    """Return a flag and its value as one word of a command line."""
    if not isinstance(value, str | float | int):
        raise ValueError(f'"{name}" must be one value, not {json.dumps(value)}')
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


class Runs:
    """Runs that stand at the same step.

    Args:
        random: each run with its `random_state`.
        folders: of all models that were asked for, finished ones among them.
    """

    def __init__(
        self, random: dict[Run, dict[str, Tensor]], folders: list[Path], stop: StopRequest
    ):
        self.all, self.folders, self.stop = list(random), folders, stop
        self.first = self.all[0]
        self._random = random
        self._left = dict.fromkeys(random, time.perf_counter())  # when a run's turn ended

    def steps(self) -> Iterator[int]:
        """Return the optimizer steps to take, counted from 1."""
        return self.first.steps()

    def in_turn(self) -> Iterator[Run]:
        """Yield each run, with its random numbers, and DeepSpeed's configuration in Accelerate's
        state; the time of the others does not count as its training."""
        for run in self.all:
            take_engine(run.engine)
            run.log.clock.paused += time.perf_counter() - self._left[run]
            restore_random(self._random[run], run.accelerator.device)
            yield run
            self._random[run] = random_state(run.accelerator.device)
            self._left[run] = time.perf_counter()

    def end(self, step: int, val_losses: dict[Run, float | None]) -> bool:
        """Save all runs where it is time for one; return whether they were asked to stop."""
        reason = self.stop.reason()
        due = [run.is_time_to_save(step, val_losses[run]) for run in self.all]
        if reason or self.stop.time_to_save or any(due):
            for run in self.in_turn():
                run.save(step, val_losses[run])
            self.stop.saved()
        if reason is None or step == self.first.total_steps:
            return False
        each_saved = [run.close() for run in self.all]
        saved = all(each_saved)
        if self.first.engine.is_main:
            state = "saved" if saved else "NOT ALL SAVED"
            print(f"report: {self._leave_report()}")
            print(f"stopped by {reason} after step {step}, {state}; to go on:")
            print(f"  {how_to_resume('auto')}", flush=True)
        end_stopped([run.engine for run in self.all], saved)
        return True

    def finish(self) -> None:
        """Leave the results of each run, and one report of all.

        Raises UsageError: the last checkpoint of a run is not there.
        """
        for run in self.in_turn():
            run.log.say(f"\n{run.folder.path}:")
            run.leave_results()
        if self.first.engine.is_main:
            ends = {path.name: final_numbers(read_history(path)) for path in self.folders}
            rows = [
                {"run": run} | {name: numbers.get(name, UNKNOWN) for name in SUMMARY}
                for run, numbers in ends.items()
            ]
            print(f"\n{columns(rows)}\n\nreport of all: {self._leave_report()}", flush=True)
        for run in self.all:
            run.accelerator.end_training()

    def _leave_report(self) -> str:
        """Write the page on which the runs lie over each other; return its path, or an error."""
        return leave_report(self.folders, Path(self.first.args.out_dir) / "several.html")


def take_engine(engine: Engine) -> None:
    """Make this engine's DeepSpeed configuration the one in Accelerate's state."""
    state = engine.accelerator.state
    if engine.plugin is not None and not state.get_deepspeed_plugin(engine.plugin).selected:
        state.select_deepspeed_plugin(engine.plugin)


def set_up_several(models: list[Model]) -> Runs | None:
    """Make everything that is there before the first step; None if all runs are finished.

    Raises UsageError, ConfigError, DataError: these cannot be trained, or not from one step.
    """
    started = time.monotonic()  # --time_limit counts from here
    first = models[0].args
    require_trackers(first.trackers)
    engines = build_engines([model.args for model in models])
    resumed = on_main_process(engines[0], lambda: resumed_together([each.args for each in models]))
    prepared = [
        prepare(replace(args, resume=checkpoint), settings, engine)
        for (args, settings), engine, checkpoint in zip(models, engines, resumed, strict=True)
    ]
    batches = {(x.config.max_seq_len, x.args.global_batch(1), x.total_steps) for x in prepared}
    if len(batches) > 1:
        raise UsageError(f"models differ in (max_seq_len, sequences of a step, steps): {batches}")
    stop = StopRequest(engines[0], first.time_limit, first.save_minutes, since=started)
    width = max(len(model.args.run_name) for model in models)
    random = {}
    for each, engine in zip(prepared, engines, strict=True):
        take_engine(engine)
        run = start_run(each, engine, stop, name=f"{each.args.run_name:<{width}}")
        if run is not None:
            random[run] = random_state(run.accelerator.device)
    if not random:
        engines[0].accelerator.end_training()
        return None
    for run in random:
        settle(run)
    return Runs(random, [each.start.folder.path for each in prepared], stop)


def resumed_together(models: list[TrainingArguments]) -> list[str | None]:
    """Return what each model is to --resume: its checkpoint of the newest step of which all have a
    sound one, or what was asked where no model has a checkpoint.

    Raises UsageError: there are checkpoints and no such step.
    """
    runs = [RunFolder(Path(args.out_dir, args.run_name)) for args in models]
    steps = [{step_of(path) for path in run.all_checkpoints()} for run in runs]
    if models[0].resume is None or not any(steps):
        return [args.resume for args in models]
    for step in sorted(set.intersection(*steps), reverse=True):
        paths = [run.checkpoint(step) for run in runs]
        problems = {path: problem for path in paths if (problem := damage(path))}
        if not problems:
            return [str(path) for path in paths]
        for path, problem in problems.items():
            print(f"DAMAGED CHECKPOINT {path}: {problem}; trying the step before", flush=True)
    raise UsageError(
        "--resume auto: there is no step of which all have a sound checkpoint: leave out the "
        "--model that is behind, or give it another run_name and start it apart"
    )
