"""Pretrain several models side by side on the same batches, to compare them.

    accelerate launch --config_file accelerate_config.yaml train_several_accelerate.py \\
      --model small.json --model large.json [flags for all models]

Each model has its own engine, random numbers and run folder. In float32 its losses equal, up to
rounding, the losses of a separate run of train_pretrain_accelerate.py. All models read the same
batches, because the order of the data does not depend on the model. All models are saved at the
same steps.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from lm.common.errors import UsageError, reason
from lm.report.page import try_to, write_report
from lm.storage.checkpoint import damage
from lm.storage.folder import RunFolder, claim, step_of
from lm.training.arguments import TrainingArguments, as_words, build_parser
from lm.training.build import random_state, restore_random
from lm.training.interruption import end_stopped, how_to_resume
from lm.training.resume import decided_arguments
from lm.training.run import Run
from lm.training.schedule import FROM_WEIGHTS
from lm.training.set_up import run_program, select_engine, set_up_together
from model.config import setting

# Training flags in which models may differ; model flags such as --dim may differ too. All models
# share the other flags, most of which concern the batches, the process, or when to log and save.
OWN = {
    *("run_name", "init_from", "deepspeed", "compile", "gradient_checkpointing"),
    *FROM_WEIGHTS,
    *("optimizer", "muon_learning_rate", "lr_schedule", "warmup_steps"),
    *("min_lr_ratio", "decay_fraction", "weight_decay", "beta1", "beta2", "muon_momentum"),
    *("grad_clip", "max_bad_steps", "sample_prompt", "sample_tokens"),
}


@dataclass
class SeveralArguments(TrainingArguments):
    """Flags of all models together. Raises UsageError for an invalid value."""

    program: ClassVar[str] = "train_several_accelerate.py"
    about: ClassVar[str] = __doc__.splitlines()[0]

    model: Sequence[str] = setting(
        (),
        'JSON file with flags of a model, such as {"dim": 256, "learning_rate": 1e-3}; once for '
        "each model; the file's name without .json is the default of run_name",
        group="models",
        repeated=True,
    )

    def __post_init__(self):
        super().__post_init__()
        for refused, said in (
            (not self.model, "pass --model FILE once for each model"),
            (self.run_name, '--run_name: give each model its own "run_name" in its file'),
            (self.resume not in (None, "auto"), "several models can only use --resume auto"),
            ({*self.trackers} - {"tensorboard"}, "several models can only use tensorboard or none"),
        ):
            if refused:
                raise UsageError(said)


def main(argv: list[str] | None = None) -> None:
    """Train with the flags in argv, for example in a notebook; None means the command line."""
    run_program(SeveralArguments, train, argv, partial(set_up, argv))


def train(runs: "Runs") -> None:
    """Train all runs step by step from the first step to the last, then write the results."""
    for step in runs.first.steps():
        val_losses = {}
        for run in runs.in_turn():
            run.begin(step)  # learning rate
            for batch in run.micro_batches():
                with run.accumulate():
                    out = run.model(batch.tokens, batch.targets)
                    run.backward(out.loss, batch, out.routing)
            grad_norm = run.update()  # clip the gradient; change the weights, if its norm is finite
            val_losses[run] = run.report(step, grad_norm)  # log, validate, sample
        runs.end(step, val_losses)  # save all runs or none
    runs.finish()  # write weights and reports, or say how to resume runs that were stopped


def set_up(argv: list[str] | None, args: SeveralArguments, model_settings: dict) -> "Runs | None":
    """Return the unfinished runs, or None. Raises UsageError or ConfigError if a run is invalid."""
    models = read_models(vars(build_parser(SeveralArguments).parse_args(argv)))
    folders = [RunFolder(Path(args.out_dir, args.run_name)) for args, _ in models]
    runs = set_up_together(models, partial(resumed_together, folders, args.resume))
    if not runs:
        return None
    together = Runs(runs, folders)
    together.repeat_validations()
    return together


class Runs:
    """Runs that take turns at the same step. `runs` maps a run to its random state. `folders` lists
    the run folders of all models, also of finished ones."""

    def __init__(self, runs: dict[Run, dict], folders: list[RunFolder]):
        self.all, self.folders = list(runs), [folder.path for folder in folders]
        self.first = self.all[0]
        for run in self.all:
            run.checkpointer.group = [each.checkpointer for each in self.all]
        self._random = runs
        self._left = dict.fromkeys(runs, time.perf_counter())  # the time at which a turn ended

    def in_turn(self) -> Iterator[Run]:
        """Yield each run after switching to its engine and random state. The clock of a run does
        not count the turns of other runs."""
        for run in self.all:
            select_engine(run.engine)
            run.log.clock.paused += time.perf_counter() - self._left[run]
            restore_random(self._random[run], run.accelerator.device)
            yield run
            self._random[run] = random_state(run.accelerator.device)
            self._left[run] = time.perf_counter()

    def repeat_validations(self) -> None:
        """After a resume, make up for validations that a stop request prevented."""
        for run in self.in_turn():
            run.repeat_validation()
        self.first.stopped = next((run.stopped for run in self.all if run.stopped), None)

    def end(self, step: int, val_losses: dict[Run, float | None]) -> None:
        """Save all runs if one run is due, --save_minutes have passed, or a stop is requested."""
        stop = self.first.stop
        reason = stop.reason()
        due = [run.is_time_to_save(step, val_losses[run]) for run in self.all]
        if reason or stop.time_to_save or any(due):
            for run in self.in_turn():
                run.save(step, val_losses[run])
            stop.saved()
        interrupted = any(run.interrupted for run in self.all)
        if reason and (step < self.first.total_steps or interrupted):
            self.first.stopped = step, reason

    def finish(self) -> None:
        """Write the results of each run and a report of all runs. Raises UsageError if a last
        checkpoint was not saved. After a stop request, print how to resume the runs instead."""
        if self.first.stopped:
            each_saved = [run.close() for run in self.all]
            if self.first.engine.is_main:
                step, reason = self.first.stopped
                state = "saved" if all(each_saved) else "NOT ALL SAVED"
                with suppress(OSError):  # a terminal that was closed
                    print(f"stopped by {reason} after step {step}, {state}; to go on:")
                    print(f"  {how_to_resume('auto')}", flush=True)
            end_stopped([run.engine for run in self.all], all(each_saved))
            return
        unsaved = [str(run.folder.path) for run in self.in_turn() if not run.write_results()]
        if self.first.engine.is_main:
            page = Path(self.first.args.out_dir) / "several.html"
            page = try_to(write_report, self.folders, page)
            print(f"\nreport of all runs: {page}", flush=True)
        for run in self.all:
            run.accelerator.end_training()
        if unsaved:
            raise UsageError(f"{', '.join(unsaved)}: the last checkpoint was not saved")


def read_models(typed: dict) -> list[tuple[TrainingArguments, dict]]:
    """Return the training arguments and model settings of each model. Raises UsageError if a file
    is unreadable or has invalid flags, or if models have the same name or different precisions."""
    models, shared = [], {name: value for name, value in typed.items() if name != "model"}
    for file in typed["model"]:
        try:
            words = as_words(json.loads(Path(file).read_text(encoding="utf-8")))
            own = {"run_name": Path(file).stem} | vars(build_parser(only=OWN).parse_args(words))
            models.append(decided_arguments(shared | own))
        except (OSError, ValueError, AttributeError) as error:
            raise UsageError(f"--model {file}: {reason(error)}") from error
    names = [args.run_name for args, _ in models]
    if len({args.dtype for args, _ in models}) > 1:
        raise UsageError("all models must have the same --dtype, which DeepSpeed files may decide")
    if len({*names}) < len(names):
        raise UsageError(f"two models have the same run_name: {', '.join(names)}")
    return models


def resumed_together(runs: list[RunFolder], resume: str | None) -> list[str | None]:
    """Return `resume` for each run if `resume` is None or no run has a checkpoint. Otherwise return
    the checkpoints of the newest step that is undamaged in all. Existing folders are locked first,
    see `find_starting_point`. Raises UsageError if no step is undamaged, or a run is in use."""
    for run in runs:
        if run.path.exists():
            claim(run)
    steps = [{step_of(path) for path in run.all_checkpoints()} for run in runs]
    if resume is None or not any(steps):
        return [resume] * len(runs)
    for step in sorted(set.intersection(*steps), reverse=True):
        paths = [run.checkpoint(step) for run in runs]
        damaged = [f"{path}: {problem}" for path in paths if (problem := damage(path))]
        if not damaged:
            return [str(path) for path in paths]
        print(f"DAMAGED CHECKPOINT {'; '.join(damaged)}; trying an earlier step", flush=True)
    reason = "no step has an undamaged checkpoint of every model"
    raise UsageError(f"--resume auto: {reason}: leave out a --model that has none")


if __name__ == "__main__":
    main()
