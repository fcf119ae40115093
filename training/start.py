"""From the command line of a training program to a run that can begin."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from common.errors import UsageError, one_line_errors
from model import ConfigError
from runs.checkpoint import write_base
from training.arguments import TrainingArguments, parse_arguments
from training.build import BuiltModel, build_model
from training.engine.failures import one_line_failures
from training.engine.launch import Engine, build_engine
from training.engine.main_process import on_every_process, on_main_process
from training.interruption import StopRequest, leave
from training.log import require_trackers
from training.notebook import leave_as_found
from training.prepare import Prepared, prepare
from training.resume import claim, say_what_changed, set_aside
from training.run import Run
from training.settings import write_settings
from training.start_block import start_block, warnings
from training.teacher import Teacher


@contextmanager
def one_program(name: str, argv: list[str] | None) -> Iterator[None]:
    """End a user's mistake in one line, and with it this rank.

    Args:
        argv: flags of a run in a process that lives on, such as a notebook's kernel. The process is
            left as it was found. None: they came from the command line.
    """
    try:
        with one_line_errors(name, UsageError, ConfigError), leave_as_found(name, argv):
            yield
    finally:
        if argv is None:
            leave()


def run_program(
    kind: type[TrainingArguments],
    train: Callable[[Run], None],
    argv: list[str] | None,
) -> None:
    """Set up a run by the arguments in argv, of this kind, and `train` it unless it is finished;
    see `one_program`."""
    with one_program(kind.program, argv):
        args, model_settings = parse_arguments(argv, kind)
        with one_line_failures(args, model_settings):
            run = set_up(args, model_settings)
            if run is not None:
                train(run)


def set_up(args: TrainingArguments, model_settings: dict) -> Run | None:
    """Make everything that is there before the first step; None if the run is finished.

    Args:
        model_settings: those that were typed.

    Raises UsageError, ConfigError, DataError: this cannot be trained.
    """
    started = time.monotonic()  # --time_limit counts from here
    require_trackers(args.trackers)
    engine = build_engine(args)
    prepared = prepare(args, model_settings, engine)
    stop = StopRequest(engine, args.time_limit, args.save_minutes, since=started)
    run = start_run(prepared, engine, stop)
    if run is None:
        engine.accelerator.end_training()
        return None
    settle(run)
    return run


def start_run(prepared: Prepared, engine: Engine, stop: StopRequest, name: str = "") -> Run | None:
    """Build the model, load its weights and say what is in use; None if the run is finished.

    In the folder of a run that goes on nothing is changed yet: `settle` does that. `name` is the
    one of `Run`. Raises UsageError, ConfigError: this cannot be trained.
    """
    args, start = prepared.args, prepared.start
    on_main_process(engine, partial(claim, start))
    engine.set_accumulation(args.accumulation_steps)
    if start.checkpoint and engine.is_main:
        say_what_changed(start, args, processes=engine.processes, engine=engine.name)
    finished = start.step >= prepared.total_steps
    if finished and on_main_process(engine, start.folder.weights.exists):
        engine.accelerator.print(
            f"{start.folder.path} is finished: {start.step} of {prepared.total_steps} steps; more "
            "--epochs or --max_steps would go on with it"
        )
        return None
    teacher = None
    if prepared.teacher:
        vocab_size = prepared.train_set.vocab_size
        teacher = Teacher(prepared.teacher, engine, args.dtype, vocab_size)
    built = build_model(prepared, engine)
    if prepared.initial.source and not start.checkpoint:
        load_initial_weights(prepared, built, engine)
    run = Run(prepared, engine, built, stop, teacher, name)
    run.log.say(start_block(run))
    for warning in warnings(run):
        run.log.say(warning)
    return run


def settle(run: Run) -> None:
    """Write down what is in use, once nothing can be refused. Every process must call it."""
    prepared, engine = run.prepared, run.engine
    if engine.is_main:
        set_aside(prepared.start)
        tokenizer = prepared.train_set.tokenizer_path
        write_settings(run.folder, run.args, prepared.config, engine, tokenizer)
    run.log.open()


def load_initial_weights(prepared: Prepared, built: BuiltModel, engine: Engine) -> None:
    """Give a new run the weights of another one. Weights to which adapters are added are kept in
    the folder of the run. Raises ConfigError: see `InitialWeights.load`."""
    weights = on_every_process(engine, prepared.initial.load)
    built.state.load_weights(weights, str(prepared.initial.source.path))
    if prepared.shapes.lora:
        folder, tokenizer = prepared.start.folder, prepared.train_set.tokenizer_path
        keep = partial(write_base, folder, prepared.config, weights, tokenizer)
        on_main_process(engine, keep)
