"""Set up a training program: from the command line to a `Run` that is ready to train."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from accelerate.state import AcceleratorState, GradientState

from lm.common.errors import UsageError, one_line_errors
from lm.common.tasks import join_tasks
from lm.engine.agreement import on_every_process, on_main_process
from lm.engine.engine import Engine, build_engines, exit_rank
from lm.storage.checkpoint import write_base
from lm.storage.folder import claim, claim_new, release_locks
from lm.training.arguments import TrainingArguments, build_parser
from lm.training.build import select_engine
from lm.training.failures import one_line_failures
from lm.training.inputs import Inputs, find_inputs
from lm.training.interruption import LIVES_ON, SIGNALS, StopRequest
from lm.training.log import require_trackers
from lm.training.resume import changes_since_stop, decided_arguments
from lm.training.run import Run
from lm.training.runs import Runs
from lm.training.start_block import start_block, warnings
from lm.training.starting_point import find_starting_points, set_aside, write_settings
from model import ConfigError

Model = tuple[TrainingArguments, dict]  # its training arguments and its model settings


def run_program(
    arguments: type[TrainingArguments],
    train: Callable[[Run], None],
    argv: list[str] | None,
    read_models: Callable[[dict], list[Model]] | None = None,
) -> None:
    """Set up a run and train it, unless it is finished. If `argv` is None, the flags are those of
    the command line, and the process ends here. With `argv`, as in a notebook, it continues.
    `read_models`, if given, returns several models from the typed flags; `train` gets the first."""
    process = nullcontext() if argv is None else notebook_process([arguments.program, *argv])
    try:
        with one_line_errors(arguments.program, UsageError, ConfigError), process:
            join_tasks()
            typed = vars(build_parser(arguments).parse_args(argv))
            args, model_settings = decided_arguments(typed, arguments)
            models = read_models(typed) if read_models else [(args, model_settings)]
            with one_line_failures(args, model_settings):
                if run := set_up(models):
                    train(run)
    finally:
        if argv is None:
            exit_rank()


@contextmanager
def notebook_process(command: list[str]) -> Iterator[None]:
    """Set sys.argv to `command` for the context. The process can then begin another run."""

    def forget_models() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # allows another precision
        GradientState._reset_state()
        if "torch._dynamo" in sys.modules:  # delete compiled code of earlier runs
            torch.compiler.reset()

    typed, sys.argv = sys.argv, command
    environ = os.environ.copy()  # the run adds variables that name its engine
    os.environ[LIVES_ON] = "1"
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    threads = torch.get_num_threads()
    forget_models()
    try:
        yield
    finally:
        forget_models()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_num_threads(threads)
        release_locks()
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = typed


def set_up(models: list[Model], run_class: type[Run] = Run) -> Run | None:
    """Set up runs that read the same batches, and return the first of those that are not finished.
    Raises UsageError or ConfigError if a run cannot be trained."""
    started, first = time.monotonic(), models[0][0]  # --time_limit counts from here
    require_trackers(first.trackers)
    engines = build_engines([args for args, _ in models])
    find = partial(find_starting_points, [args for args, _ in models], claims=True)
    starts = on_main_process(engines[0], find)
    inputs = [
        find_inputs(args, settings, engine, start=start)
        for (args, settings), engine, start in zip(models, engines, starts, strict=True)
    ]
    require_the_same_batches(inputs)
    runs = Runs(StopRequest(engines[0], first.time_limit, first.save_minutes, since=started))
    for each, engine in zip(inputs, engines, strict=True):
        select_engine(engine)
        name = each.args.run_name if len(models) > 1 else ""
        if run := start_run(each, engine, runs, name, run_class):
            runs.add(run)
    for run in runs.all:
        on_main_process(run.engine, partial(run.log.start_trackers, run.settings))
    for run in runs.all:  # rename checkpoints and write settings after all runs are set up
        if run.engine.is_main:
            set_aside(run.inputs.start)
            write_settings(run.folder, run.settings, run.inputs.train_set)
        run.log.open()
    if not runs.all:
        engines[0].accelerator.end_training()
        return None
    runs.repeat_validations()
    return runs.all[0]


def require_the_same_batches(inputs: list[Inputs]) -> None:
    """Raise UsageError if two models would read different batches."""
    for name, values in {
        "max_seq_len": [x.config.max_seq_len for x in inputs],
        "number of sequences per process and step": [x.args.global_batch(1) for x in inputs],
        "number of steps": [x.total_steps for x in inputs],
    }.items():
        if len({*values}) > 1:
            of_each = [f"{x.args.run_name} {v}" for x, v in zip(inputs, values, strict=True)]
            raise UsageError(f"all models must have the same {name}: {', '.join(of_each)}")


def start_run(
    inputs: Inputs, engine: Engine, runs: Runs, name: str, run_class: type[Run]
) -> Run | None:
    """Build the model, load weights and print the start block. Return None if the run is finished.
    Every process must call it. Raises UsageError or ConfigError if the run cannot be trained."""
    args, start, train_set = inputs.args, inputs.start, inputs.train_set
    take = claim if args.run_name or start.checkpoint else claim_new
    start = replace(start, folder=on_main_process(engine, partial(take, start.folder)))
    inputs = replace(inputs, start=start)
    runs.folders.append(start.folder)
    engine.set_accumulation(args.accumulation_steps)
    if start.step >= inputs.total_steps and on_main_process(engine, start.folder.weights.exists):
        steps = f"{start.step} of {inputs.total_steps} steps"
        engine.accelerator.print(f"{start.folder.path} is finished, {steps}: raise --max_steps")
        return None
    run = run_class(inputs, engine, runs, name)
    if inputs.source and not start.checkpoint:
        model = on_every_process(engine, inputs.source.load)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        run.state.load_weights(weights, str(inputs.source.path))
        if inputs.shapes.lora:  # the run folder needs the frozen weights too
            keep = (start.folder, inputs.config, weights, train_set.tokenizer_path)
            on_main_process(engine, partial(write_base, *keep))
    for text in (start_block(run), *changes_since_stop(start, run.settings), *warnings(run)):
        run.log.say(text)
    return run
