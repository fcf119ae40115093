"""From flags to a run that can begin: what all training programs do alike. What they differ in is
the kind of their arguments, which says what data is read and how the model is changed."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from data.dataset import PackedDataset
from runs.base import write_base
from runs.folder import RunFolder
from training.arguments import TrainingArguments
from training.engine.launch import Engine, build_engine
from training.engine.main_process import on_every_process, on_main_process, require_the_same
from training.initial_weights import InitialWeights
from training.resume import describe_finished, say_what_changed, set_aside, starting_weights
from training.run import Run
from training.schedule import count_steps
from training.settings import write_settings
from training.setup import (
    BuiltModel,
    build_model,
    find_start,
    open_splits,
    plan_compilation,
    shapes_of,
    warn_of_ram,
    with_data,
)
from training.start_block import start_block, warnings
from training.teacher import TeacherWeights, find_teacher
from training.trackers import require_trackers, start_trackers


def set_up(args: TrainingArguments, model_settings: dict) -> Run | None:
    """Everything that is there before the first step; None if the run is finished.

    Args:
        model_settings: those that were typed.

    Raises UsageError, ConfigError: this cannot be trained.
    """
    started = time.monotonic()  # --time_limit counts from here
    require_trackers(args.trackers)
    engine = build_engine(args)
    accelerator = engine.accelerator
    initial = on_main_process(
        accelerator, lambda: InitialWeights.find(starting_weights(args), model_settings)
    )
    teacher = on_main_process(accelerator, lambda: find_teacher(args))
    args = teacher.named_in(args) if teacher else args
    prepared = on_main_process(accelerator, lambda: with_data(args, initial))
    args = replace(args, data=args.data or prepared.data)  # each process keeps its own flags
    train_set, val_set = open_splits(args, initial.max_seq_len, engine)
    sets = {"train_set": train_set, "val_set": val_set}
    run = start_run(args, engine, initial, **sets, started=started, found_teacher=teacher)
    if run is None:
        accelerator.end_training()
        return None
    settle(run)
    return run


def start_run(
    args: TrainingArguments,
    engine: Engine,
    initial: InitialWeights,
    *,
    train_set: PackedDataset,
    val_set: PackedDataset | None,
    started: float,
    beside: int = 0,
    found_teacher: TeacherWeights | None = None,
) -> Run | None:
    """Build the model, resume where asked, and say what is in use; None if the run is finished. In
    the folder of a run that goes on nothing is changed yet: `settle` does that.

    Args:
        train_set, val_set: see `open_splits`.
        started: when the program was, by `time.monotonic`; --time_limit counts from there.
        beside: bytes that other models keep from a process, see `training.engine.memory.stays`.
        found_teacher: see training/teacher.py; None where nobody teaches.

    Raises UsageError, ConfigError: this cannot be trained.
    """
    accelerator = engine.accelerator
    config = on_every_process(engine, lambda: initial.config(train_set))
    shapes_of(config, args.adapt)  # what cannot be built leaves no folder
    sha256 = None
    if found_teacher:
        found_teacher.require_processes()
        on_every_process(engine, lambda: found_teacher.require_fit(train_set))
        sha256 = on_every_process(engine, found_teacher.sha256)
        require_the_same(engine, {"teacher": sha256[:16]})  # each reads its own disk

    # A new run or an old one, and how many steps.
    asked = args
    start, args = find_start(asked, config, train_set, engine, sha256)
    engine.set_accumulation(args.accumulation_steps)
    if start.checkpoint and engine.is_main:
        say_what_changed(start, asked, args, processes=engine.processes, engine=engine.name)
    total_steps = count_steps(args, len(train_set), engine.processes)
    if start.step >= total_steps and on_main_process(accelerator, start.folder.weights.exists):
        accelerator.print(describe_finished(start, total_steps))
        return None

    # The model, with the weights of a checkpoint, of another run, or drawn at random.
    compilation = plan_compilation(args, config, start, total_steps, engine, train_set)
    warn_of_ram(args, config, engine, found_teacher and found_teacher.beside)
    teacher = found_teacher and found_teacher.build(sha256, engine, args.dtype, train_set)
    built = build_model(config, args, engine, compilation, args.adapt)
    if initial.source and not start.checkpoint:
        begin_with(initial, built, engine, start.folder, train_set.tokenizer_path)
    run = Run(
        args,
        engine,
        start,
        built,
        train_set=train_set,
        val_set=val_set,
        total_steps=total_steps,
        started=started,
        teacher=teacher,
    )

    run.log.say(start_block(run, initial, beside))
    for warning in warnings(run, beside):
        run.log.say(warning)
    return run


def settle(run: Run) -> None:
    """Write down what is in use, and set aside what belongs to a course not taken: when nothing can
    be refused any more, of this run and of those beside it. All must call this."""
    config = run.built.config
    if run.engine.is_main:
        set_aside(run.start)
        tokenizer = run.train_set.tokenizer_path
        write_settings(run.folder, run.args, config, run.engine, tokenizer)
    run.log.open()
    run.samples.open()
    start_trackers(run.accelerator, run.args, run.folder.path, config, run.first_step)


def begin_with(
    initial: InitialWeights, built: BuiltModel, engine: Engine, folder: RunFolder, tokenizer: Path
) -> None:
    """Give a new run the weights of another one, and keep them in its folder where they are the
    base of adapters. Raises ConfigError: see `InitialWeights.load`."""
    weights = on_every_process(engine, initial.load)
    built.state.load_weights(weights, str(initial.source.path))
    if built.lora:
        keep = partial(write_base, folder, built.config, weights, tokenizer)
        on_main_process(engine.accelerator, keep)
