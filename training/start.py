"""From flags and data to a run that can begin: what all training programs do alike."""

from collections.abc import Callable
from functools import partial

from data.dataset import PackedDataset
from model import Transformer
from runs.base import write_base
from training.arguments import TrainingArguments
from training.engine.launch import Engine
from training.engine.main_process import on_every_process, on_main_process
from training.initial_weights import InitialWeights
from training.resume import describe_finished, say_what_changed, set_aside
from training.run import Run
from training.schedule import count_steps
from training.settings import write_settings
from training.setup import build_model, find_start, plan_compilation, shapes_of
from training.start_block import start_block, warnings
from training.trackers import start_trackers


def start_run(
    args: TrainingArguments,
    engine: Engine,
    initial: InitialWeights,
    *,
    train_set: PackedDataset,
    val_set: PackedDataset | None,
    started: float,
    adapt: Callable[[Transformer], object] = lambda model: None,
) -> Run | None:
    """Build the model, resume where asked, and say what is in use; None if the run is finished.

    Args:
        train_set, val_set: see `open_splits`.
        started: when the program was, by `time.monotonic`; --time_limit counts from there.
        adapt: see `build_model`.

    Raises UsageError, ConfigError: this cannot be trained.
    """
    accelerator = engine.accelerator
    config = on_every_process(engine, lambda: initial.config(train_set))
    shapes_of(config, adapt)  # what cannot be built leaves no folder

    # A new run or an old one, and how many steps.
    asked = args
    start, args = find_start(asked, config, train_set, engine)
    engine.set_accumulation(args.accumulation_steps)
    if start.checkpoint and engine.is_main:
        say_what_changed(start, asked, args, engine.processes)
    total_steps = count_steps(args, len(train_set), engine.processes)
    if start.step >= total_steps and on_main_process(accelerator, start.folder.weights.exists):
        accelerator.print(describe_finished(start, total_steps))
        accelerator.end_training()
        return None

    # The model, with the weights of a checkpoint, of another run, or drawn at random.
    compilation = plan_compilation(args, config, start, total_steps, engine)
    built = build_model(config, args, engine, compilation, adapt)
    if initial.source and not start.checkpoint:
        weights = on_every_process(engine, initial.load)
        built.state.load_weights(weights, str(initial.source.path))
        if built.lora:
            tokenizer = train_set.tokenizer_path
            keep = partial(write_base, start.folder, config, weights, tokenizer)
            on_main_process(accelerator, keep)
    run = Run(
        args,
        engine,
        start,
        built,
        train_set=train_set,
        val_set=val_set,
        total_steps=total_steps,
        started=started,
    )

    # What is in use, said and written down; what belongs to a course not taken is set aside.
    run.log.say(start_block(run, initial))
    for warning in warnings(run):
        run.log.say(warning)
    if engine.is_main:
        set_aside(start)
        write_settings(run.folder, args, config, engine, train_set.tokenizer_path)
    start_trackers(accelerator, args, run.folder.path, config, run.first_step)
    return run
