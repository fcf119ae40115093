"""Pretrain a small Llama-like model on packed tokens.

    accelerate launch --config_file accelerate_config.yaml train_pretrain_accelerate.py [flags]

Reads what `python -m scripts.prepare_data` wrote, trains through Accelerate on whatever engine the
launcher chose (DeepSpeed ZeRO, DDP, or a single process) and leaves everything in one run folder. A
step always means an optimizer step; a micro-batch is what one process feeds forward at once.
"""

import time

from common.errors import UsageError, one_line_errors
from model import ConfigError
from training.arguments import TrainingArguments, parse_arguments
from training.engine.failures import one_line_failures
from training.engine.launch import build_engine
from training.engine.main_process import on_every_process, on_main_process
from training.initial_weights import InitialWeights
from training.interruption import leave
from training.notebook import leave_as_found
from training.resume import describe_finished, say_what_changed, set_aside
from training.run import Run
from training.schedule import count_steps
from training.settings import write_settings
from training.setup import build_model, find_start, open_splits, plan_compilation
from training.start_block import start_block, warnings
from training.trackers import require_trackers, start_trackers

PROGRAM = "train_pretrain_accelerate.py"


def main(argv: list[str] | None = None) -> None:
    """Train as the flags say: those in argv, and then the process lives on, or the command line's.

    A notebook calls it through `accelerate.notebook_launcher(main, args=(argv,))`.
    """
    with one_line_errors(PROGRAM, UsageError, ConfigError), leave_as_found(PROGRAM, argv):
        args, model_settings = parse_arguments(argv)
        with one_line_failures(args, model_settings):
            train(args, model_settings)


def train(args: TrainingArguments, model_settings: dict) -> None:
    """Everything between the flags and the finished run."""
    run = set_up(args, model_settings)
    if run is None:
        return
    for step in run.steps():
        run.begin(step)  # learning rate
        for tokens, targets in run.micro_batches():
            with run.accumulate():
                loss = run.model(tokens, targets).loss
                run.backward(loss)
        run.update()  # clip, optimizer step
        if run.end(step):  # log, validate, sample, save; true: told to stop
            return
    run.finish()


def set_up(args: TrainingArguments, model_settings: dict) -> Run | None:
    """Build everything, resume where asked, and say what is in use; None if the run is finished.
    Raises UsageError, ConfigError: this cannot be trained."""
    started = time.monotonic()  # --time_limit counts from here
    require_trackers(args.trackers)
    engine = build_engine(args)
    accelerator = engine.accelerator

    # What is trained, and on what.
    initial = on_main_process(
        accelerator, lambda: InitialWeights.find(args.init_from, model_settings)
    )
    train_set, val_set = open_splits(args, initial.max_seq_len, engine)
    config = on_every_process(engine, lambda: initial.config(train_set))

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
    built = build_model(config, args, engine, compilation)
    if initial.source and not start.checkpoint:
        weights = on_every_process(engine, initial.load)
        built.state.load_weights(weights, str(initial.source.path))
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


if __name__ == "__main__":
    try:
        main()
    finally:
        leave()
