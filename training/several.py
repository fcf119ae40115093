"""Several runs side by side, on the same batches: what train_several_accelerate.py works on."""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import tee
from pathlib import Path

from tqdm import tqdm

from common.columns import columns
from common.errors import UsageError
from report.history import read_history
from report.page import UNKNOWN, final_numbers, leave_report, write_report
from runs.checkpoint import damage, space_warning
from runs.folder import RunFolder
from training.arguments import TrainingArguments
from training.checkpointing import prune
from training.engine.kinds import kind_of
from training.engine.launch import Engine, build_engines
from training.engine.main_process import on_every_process, on_main_process
from training.engine.memory import stays
from training.engine.turns import Turn
from training.engine.workload import Workload
from training.initial_weights import InitialWeights
from training.interruption import StopRequest, end_stopped, how_to_resume
from training.resume import find_starting_point, starting_weights
from training.run import Run
from training.setup import open_splits, with_data
from training.several_arguments import Model
from training.start import settle, start_run
from training.trackers import require_trackers

SUMMARY = (
    *("training loss", "validation loss", "best validation loss", "bits per byte"),
    *("tokens per second", "training time"),
)


class Lane:
    """One run's part of a progress bar that all share, in place of one of its own."""

    def __init__(self, bar: tqdm, name: str, shown: dict[str, str]):
        self._bar, self._name, self._shown = bar, name, shown
        self.disable = bar.disable
        self.clear = bar.clear

    def update(self) -> None:
        """The bar goes on when all have."""

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self._shown[self._name] = f"{self._name} {text}"
        self._bar.set_postfix_str("; ".join(self._shown.values()), refresh=refresh)

    def close(self) -> None:
        """The bar stays for the others."""
        self._shown.pop(self._name, None)


class Runs:
    """Runs that stand at the same step. In its turn each is as if it were alone in the process.

    Args:
        turns: those in which the runs were built; no run twice.
        sizes: folder → parameters, of all that were asked for, those that are finished among them.
        started: when the program was, by `time.monotonic`; --time_limit counts from there.
    """

    def __init__(self, turns: dict[Run, Turn], sizes: dict[Path, int], started: float):
        self.turns, self.sizes = turns, sizes
        self.all = list(turns)
        self.gave_up: list[Run] = []
        first = self.all[0]
        self.engine, self.args, self.started = first.engine, first.args, started
        self.first_step, self.total_steps = first.first_step, first.learning_rate.total_steps
        self.bar = first.log.bar
        width, shown = max(len(run.folder.path.name) for run in self.all), {}
        for run, batches in zip(self.all, tee(first.batches, len(self.all)), strict=True):
            run.batches = batches
            name = run.folder.path.name
            if run is not first:
                run.log.bar.close()
            run.log.bar, run.log.prefix = Lane(self.bar, name, shown), f"{name:<{width}}  "
        self._keep_for_each_other()

    def _keep_for_each_other(self) -> None:
        """Each keeps a checkpoint of the newest step that all have, of those that are trained."""
        for run in self.trained:
            run.checkpointer.beside = [other.folder for other in self.trained if other is not run]

    def space_warning(self) -> str | None:
        """What to tell if the disk has too little room for the checkpoints of all together."""
        n_parameters = sum(run.built.n_trained for run in self.all)
        return space_warning(Path(self.args.out_dir), n_parameters, self.args.keep_last)

    def steps(self) -> Iterator[int]:
        """The optimizer steps to take, counted from 1. From now on a signal asks all to stop."""
        limits = self.args.time_limit, self.args.save_minutes
        self.stop = StopRequest(self.engine, *limits, since=self.started)
        for run in self.all:
            run.model.train()
        yield from range(self.first_step, self.total_steps + 1)

    @property
    def trained(self) -> list[Run]:
        """Those that have not given up."""
        return [run for run in self.all if run not in self.gave_up]

    def in_turn(self) -> Iterator[Run]:
        """Those that are trained, one after the other."""
        for run in self.trained:
            with self.turns[run].taken(), run.log.turn():
                yield run

    def end(self, step: int) -> bool:
        """Save where it is time for one of them: all, so that all can go on from the same step.
        True: they were told to stop, and have said their last words. Raises UsageError: none of
        them works any more."""
        self._let_go()
        self.bar.update()
        reason = self.stop.reason()
        due = [run.is_time_to_save(step) for run in self.trained]
        if reason or self.stop.time_to_save or any(due):
            for run in self.in_turn():
                run.save(step)
            self.stop.saved()
        for run in self.trained:
            run.checkpointer.poll()
        if reason is None or step == self.total_steps:
            return False
        each_saved = [run.close() for run in self.trained]
        saved = all(each_saved)
        self.bar.close()
        if self.engine.is_main:
            state = "saved" if saved else "NOT ALL SAVED"
            for run in self.all:
                leave_report(run.folder)
            print(f"report: {self._leave_report()}")
            without = "".join(f", without the --model of {run.folder.path}" for run in self.gave_up)
            print(f"stopped by {reason} after step {step}, {state}; to go on{without}:")
            print(f"  {how_to_resume('auto')}", flush=True)
        end_stopped([run.engine for run in self.all], saved)
        return True

    def _let_go(self) -> None:
        """Of those that give up: the others go on without them, and are not held back by them."""
        for run in self.trained:
            if run.gives_up:
                run.log.say(f"GAVE UP: {run.give_up()}")
                run.close()
                run.batches = iter(())  # else all that the others read would be kept for it
                self.gave_up.append(run)
                self._keep_for_each_other()
        if len(self.gave_up) == len(self.all):
            self.bar.close()
            raise UsageError("no model is left: each has given up, as said above")

    def finish(self) -> None:
        """Leave what each run leaves at its end, and the page on which they lie over each other,
        whether anybody still reads what is said or not. Raises UsageError: the last checkpoint of
        one is not there, or one has given up."""
        self.bar.close()
        missing = []
        for run in self.in_turn():
            run.log.prefix = ""  # it stands over all that follows
            run.log.say(f"\n{run.folder.path}:")
            if not run.leave():
                missing.append(f"{run.folder.path} has its weights, and not its last checkpoint")
        if self.engine.is_main:
            for run in self.trained:  # each has kept one more while others were behind
                prune(run.folder, self.args.keep_last, run.checkpointer.beside)
            end = f"\n{self._summary()}\n\nreport of all: {self._leave_report()}"
            self.trained[0].log.say(end)
        missing += [f"{run.folder.path} gave up, see above" for run in self.gave_up]
        for run in self.all:
            run.accelerator.end_training()
        if missing:
            raise UsageError("; ".join(missing))

    def _leave_report(self) -> str:
        """Where it is, or why there is none."""
        out = Path(self.args.out_dir) / "several.html"
        try:
            write_report(list(self.sizes), out)
        except (UsageError, OSError, ValueError, ArithmeticError) as error:
            return f"NOT WRITTEN: {error}"
        return str(out)

    def _summary(self) -> str:
        """A row per run, a column for each number that one of them has."""
        ends = [final_numbers(read_history(path)) for path in self.sizes]
        known = [name for name in SUMMARY if any(name in numbers for numbers in ends)]
        rows = []
        for (path, size), numbers in zip(self.sizes.items(), ends, strict=True):
            row = {"run": path.name, "parameters": f"{size / 1e6:.2f} million"}
            rows.append(row | {name: numbers.get(name, UNKNOWN) for name in known})
        return columns(rows)


def set_up_several(models: list[Model]) -> Runs | None:
    """Everything that is there before the first step; None if all runs are finished.

    Raises UsageError, ConfigError: these cannot be trained, or not from one step.
    """
    started = time.monotonic()  # --time_limit counts from here
    asked = [model.args for model in models]
    require_trackers(asked[0].trackers)
    engines = build_engines(asked)
    accelerator = engines[0].accelerator
    resumed = on_main_process(accelerator, lambda: resumed_together(asked))
    asked = [replace(args, resume=path) for args, path in zip(asked, resumed, strict=True)]
    initials = on_main_process(
        accelerator,
        lambda: [
            InitialWeights.find(starting_weights(args), model.settings)
            for args, model in zip(asked, models, strict=True)
        ],
    )
    _require_one_length(asked, initials)
    prepared = on_main_process(accelerator, lambda: with_data(asked[0], initials[0]))
    data = asked[0].data or prepared.data
    asked = [replace(args, data=data) for args in asked]
    train_set, val_set = open_splits(asked[0], initials[0].max_seq_len, engines[0])
    where = {"processes": engines[0].processes, "device": accelerator.device}
    works = on_every_process(
        engines[0],
        lambda: [
            Workload.of(args, initial.config(train_set), **where)
            for args, initial in zip(asked, initials, strict=True)
        ],
    )
    common = {"train_set": train_set, "val_set": val_set, "started": started}
    turns = _start(asked, engines, initials, works, common)
    if not turns:
        accelerator.end_training()
        return None
    folders = (_folder_of(args).path for args in asked)
    sizes = dict(zip(folders, (work.parameters.total for work in works), strict=True))
    runs = Runs(turns, sizes, started)
    if accelerator.is_main_process and (full := runs.space_warning()):
        print(full, flush=True)
    return runs


def _start(
    models: list[TrainingArguments],
    engines: list[Engine],
    initials: list[InitialWeights],
    works: list[Workload],
    common: dict,
) -> dict[Run, Turn]:
    """Those that are not finished, each with the turn in which it was built. Folders of runs that
    go on are changed when all have been started, for the last one may be refused yet.

    Args:
        common: what `start_run` is told of all alike.
    """
    kept = [
        stays(kind_of(engine.deepspeed, work.config.dim), work)
        for engine, work in zip(engines, works, strict=True)
    ]
    turns = {}
    for args, engine, initial, own in zip(models, engines, initials, kept, strict=True):
        turn = Turn(engine)
        with turn.taken():
            run = start_run(args, engine, initial, **common, beside=sum(kept) - own)
        if run is not None:
            turns[run] = turn
    _require_one_batch(list(turns))
    for run in turns:
        settle(run)
    return turns


def resumed_together(models: list[TrainingArguments]) -> list[str | None]:
    """What each is to --resume: its checkpoint of the newest step of which all have a sound one; or
    as it was asked where there is none at all. Raises UsageError: there are some, and no such step;
    one gave up, and the others went on; or a new run would fall on an old one, which is said before
    any folder is made."""
    runs = [_folder_of(args) for args in models]
    steps = [{int(path.name[5:]) for path in run.all_checkpoints()} for run in runs]
    if models[0].resume is None or not any(steps):
        for args in models:
            find_starting_point(args, quiet=True)
        return [args.resume for args in models]
    _require_none_left_behind(runs, steps)
    for step in sorted(set.intersection(*steps), reverse=True):
        paths = [run.checkpoint(step) for run in runs]
        problems = {path: problem for path in paths if (problem := damage(path))}
        for path, problem in problems.items():
            print(f"DAMAGED CHECKPOINT {path}: {problem}; trying the step before", flush=True)
        if not problems:
            return [str(path) for path in paths]
    known = (
        f"{run.path} {', '.join(map(str, sorted(own))) or 'none'}"
        for run, own in zip(runs, steps, strict=True)
    )
    raise UsageError(
        f"--resume auto: there is no step of which all have a sound checkpoint ({'; '.join(known)})"
        ": leave out the --model that is behind, or give it another run_name and start it apart"
    )


def _folder_of(args: TrainingArguments) -> RunFolder:
    return RunFolder(Path(args.out_dir, args.run_name))


def _require_none_left_behind(runs: list[RunFolder], steps: list[set[int]]) -> None:
    """Raises UsageError: one has given up, and all would go back to where it was."""
    newest = max(set.union(*steps))
    for run, own in zip(runs, steps, strict=True):
        if run.bad_samples.exists() and newest not in own:
            last = f"its newest checkpoint is of step {max(own)}" if own else "it has no checkpoint"
            raise UsageError(
                f"--resume auto: {run.path} gave up, {last}, and others went on to step {newest}: "
                "leave out its --model, and train it apart"
            )


def _require_one_length(models: list[TrainingArguments], initials: list[InitialWeights]) -> None:
    """Raises UsageError: sequences of different lengths, by --init_from."""
    lengths = {
        args.run_name: initial.max_seq_len for args, initial in zip(models, initials, strict=True)
    }
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UsageError(f"models read the same batches, pass --max_seq_len for all ({said})")


def _require_one_batch(runs: list[Run]) -> None:
    """Raises UsageError: on another number of processes each would keep the batch that it had."""
    batches = {run.folder.path.name: run.samples_per_step for run in runs}
    if len(set(batches.values())) > 1:
        said = ", ".join(f"{name} {batch}" for name, batch in batches.items())
        raise UsageError(
            "models read the same batches, and those that go on here have had different ones, in "
            f"sequences: {said}; train_pretrain_accelerate.py goes on with each apart"
        )
