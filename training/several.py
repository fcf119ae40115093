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

import torch
from torch import Tensor

from common.errors import UsageError
from common.numbers import columns
from model import ConfigError
from report.history import read_history
from report.page import UNKNOWN, final_numbers, leave_report, write_report
from runs.checkpoint import damage
from runs.folder import RunFolder, step_of
from training.arguments import TrainingArguments, as_arguments, build_parser
from training.engine.launch import Engine, build_engines
from training.engine.main_process import on_main_process
from training.interruption import StopRequest, end_stopped, how_to_resume
from training.prepare import prepare
from training.resume import find_starting_point
from training.run import Run
from training.start import settle, start_run
from training.trackers import require_trackers

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
    trained together; names the file.
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
    given = vars(parser.parse_args(argv))
    files = given.pop("model")
    if "run_name" in given:
        raise UsageError('--run_name: each model has one of its own, "run_name" in its file')
    models = [Model(*_read(file, given)) for file in files]
    _require_shared(files, models)
    return models


def _read(file: str, given: dict) -> tuple[TrainingArguments, dict]:
    """Read a model's flags; `given` are those of the command line, for all models."""
    try:
        flags = json.loads(Path(file).read_text(encoding="utf-8"))
        own = build_parser().parse_args([_word(name, value) for name, value in flags.items()])
        return as_arguments(given | {"run_name": Path(file).stem} | vars(own))
    except OSError as error:
        raise UsageError(f"--model {file}: {error.strerror}") from error
    except (UsageError, ConfigError) as error:
        raise type(error)(f"{file}: {error}") from error
    except (ValueError, RecursionError, AttributeError) as error:
        raise UsageError(
            f'--model {file}: needs flags and their values in braces, such as {{"dim": 128}} '
            f"({error})"
        ) from error


def _word(name: str, value) -> str:
    """Return a flag and its value as one word of a command line."""
    if isinstance(value, list | dict | None):
        raise ValueError(f'"{name}" must be one value, not {json.dumps(value)}')
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _require_shared(files: list[str], models: list[Model]) -> None:
    """Raise UsageError where models differ in what has to be the same for all."""
    first = models[0].args
    if first.resume not in (None, "auto"):
        raise UsageError(
            f"--resume {first.resume}: several models take --resume auto, and go on from the "
            "newest step of which all of them have a checkpoint"
        )
    if first.keep_last == 1:
        raise UsageError("--keep_last 1: several models need 2, one may be behind the others")
    if set(first.trackers) - {"tensorboard", "none"}:
        raise UsageError(f"--log_with {first.log_with}: several models take tensorboard or none")
    for name in (item.name for item in fields(first) if item.name not in OWN):
        for file, model in zip(files, models, strict=True):
            if getattr(model.args, name) != getattr(first, name):
                raise UsageError(
                    f"--{name} must be the same for all models: it is {getattr(first, name)!r} in "
                    f"{files[0]} and {getattr(model.args, name)!r} in {file}"
                )
    names = [model.args.run_name for model in models]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two models have the run_name {twice[0]!r}: give each one of its own")


class Runs:
    """Runs that stand at the same step.

    Args:
        runs: each with its random state, see `get_random`.
        folders: of all models that were asked for, finished ones among them.
    """

    def __init__(self, runs: dict[Run, list[Tensor]], folders: list[Path], stop: StopRequest):
        self.all, self.folders, self.stop = list(runs), folders, stop
        self.engine, self.args = self.all[0].engine, self.all[0].args
        self.gave_up: list[Run] = []
        self._random = runs
        self._left = dict.fromkeys(runs, time.perf_counter())

    def steps(self) -> Iterator[int]:
        """Yield the optimizer steps to take, counted from 1."""
        for run in self.all:
            run.model.train()
        yield from range(self.all[0].first_step, self.all[0].total_steps + 1)

    @property
    def trained(self) -> list[Run]:
        """The runs that have not given up."""
        return [run for run in self.all if run not in self.gave_up]

    def in_turn(self) -> Iterator[Run]:
        """Yield each run that is trained, with its random numbers, and DeepSpeed's configuration
        in Accelerate's state; the time of the others does not count as its training."""
        for run in self.trained:
            take_engine(run.engine)
            run.log.clock.paused += time.perf_counter() - self._left[run]
            set_random(self._random[run])
            yield run
            self._random[run] = get_random(run.engine)
            self._left[run] = time.perf_counter()

    def end(self, step: int, val_losses: dict[Run, float | None]) -> bool:
        """Save all runs where it is time for one of them; return whether they were asked to stop.

        Raises UsageError: every run has given up.
        """
        for run in self.trained:
            if run.gives_up(step):
                run.log.say(f"GAVE UP: {run.give_up(step)}")
                run.close()
                self.gave_up.append(run)
        if not self.trained:
            raise UsageError("no model is left: each has given up, as said above")
        reason = self.stop.reason()
        due = any(run.is_time_to_save(step, val_losses[run]) for run in self.trained)
        if reason or self.stop.time_to_save or due:
            for run in self.in_turn():
                run.save(step, val_losses[run])
            self.stop.saved()
        for run in self.trained:
            run.checkpointer.poll()
        if reason is None or step == self.all[0].total_steps:
            return False
        each_saved = [run.close() for run in self.trained]
        saved = all(each_saved)
        if self.engine.is_main:
            for run in self.all:
                leave_report(run.folder)
            print(f"report: {self._leave_report()}")
            state = "saved" if saved else "NOT ALL SAVED"
            print(f"stopped by {reason} after step {step}, {state}; to go on:")
            print(f"  {how_to_resume('auto')}", flush=True)
        end_stopped([run.engine for run in self.all], saved)
        return True

    def finish(self) -> None:
        """Leave the results of each run, and one report of all.

        Raises UsageError: the last checkpoint of a run is not there, or a run has given up.
        """
        missing = [f"{run.folder.path} gave up, see above" for run in self.gave_up]
        for run in self.in_turn():
            run.log.say(f"\n{run.folder.path}:")
            if not run.leave_results():
                missing.append(f"{run.folder.path} has its weights, and not its last checkpoint")
        if self.engine.is_main:
            self.trained[0].log.say(f"\n{self._summary()}\n\nreport of all: {self._leave_report()}")
        for run in self.all:
            run.accelerator.end_training()
        if missing:
            raise UsageError("; ".join(missing))

    def _leave_report(self) -> str:
        """Write the page on which the runs lie over each other; return its path, or an error."""
        out = Path(self.args.out_dir) / "several.html"
        try:
            write_report(self.folders, out)
        except (UsageError, OSError, ValueError, ArithmeticError) as error:
            return f"NOT WRITTEN: {error}"
        return str(out)

    def _summary(self) -> str:
        """Return a table of the final numbers, a row per run."""
        ends = {path.name: final_numbers(read_history(path)) for path in self.folders}
        return columns(
            [
                {"run": run} | {name: numbers.get(name, UNKNOWN) for name in SUMMARY}
                for run, numbers in ends.items()
            ]
        )


def get_random(engine: Engine) -> list[Tensor]:
    """Return the state of torch's generators; on a GPU wait for the work that it was given."""
    if engine.accelerator.device.type != "cuda":
        return [torch.get_rng_state()]
    torch.cuda.synchronize()
    return [torch.get_rng_state(), torch.cuda.get_rng_state()]


def set_random(states: list[Tensor]) -> None:
    """Set the state of torch's generators, as `get_random` returned it."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


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
    asked = [model.args for model in models]
    require_trackers(asked[0].trackers)
    engines = build_engines(asked)
    resumed = on_main_process(engines[0], lambda: resumed_together(asked))
    prepared = []
    for model, engine, checkpoint in zip(models, engines, resumed, strict=True):
        take_engine(engine)
        args = replace(model.args, resume=checkpoint)
        prepared.append(
            prepare(
                args,
                model.settings,
                engine,
                processes=engine.processes,
                deepspeed=engine.deepspeed,
            )
        )
    values = [
        (each.config.max_seq_len, each.identity["global_batch"], each.total_steps)
        for each in prepared
    ]
    if len(set(values)) > 1:
        raise UsageError(
            "models read the same batches, but theirs are of (max_seq_len, sequences, steps) "
            f"{', '.join(map(str, values))}: pass --max_seq_len for all, or train them apart"
        )
    stop = StopRequest(engines[0], asked[0].time_limit, asked[0].save_minutes, since=started)
    width = max(len(args.run_name) for args in asked)
    runs = {}
    for each, engine in zip(prepared, engines, strict=True):
        take_engine(engine)
        run = start_run(each, engine, stop, name=f"{each.args.run_name:<{width}}")
        if run is not None:
            runs[run] = get_random(engine)
    if not runs:
        engines[0].accelerator.end_training()
        return None
    for run in runs:
        settle(run)
    return Runs(runs, [each.start.folder.path for each in prepared], stop)


def resumed_together(models: list[TrainingArguments]) -> list[str | None]:
    """Return what each model is to --resume: its checkpoint of the newest step of which all have a
    sound one, or what was asked where no model has a checkpoint.

    Raises UsageError: there are checkpoints and no such step, or a new run would fall on an old
    one.
    """
    runs = [RunFolder(Path(args.out_dir, args.run_name)) for args in models]
    steps = [{step_of(path) for path in run.all_checkpoints()} for run in runs]
    if models[0].resume is None or not any(steps):
        for args in models:
            find_starting_point(args, quiet=True)
        return [args.resume for args in models]
    for step in sorted(set.intersection(*steps), reverse=True):
        paths = [run.checkpoint(step) for run in runs]
        problems = {path: problem for path in paths if (problem := damage(path))}
        for path, problem in problems.items():
            print(f"DAMAGED CHECKPOINT {path}: {problem}; trying the step before", flush=True)
        if not problems:
            return [str(path) for path in paths]
    raise UsageError(
        "--resume auto: there is no step of which all have a sound checkpoint: leave out the "
        "--model that is behind, or give it another run_name and start it apart"
    )
