"""Pretrain a small Llama-like model on packed tokens.

    accelerate launch --config_file accelerate_config.yaml train_pretrain_accelerate.py [flags]

Reads what `python -m scripts.prepare_data` wrote, trains through Accelerate on whatever engine the
launcher chose (DeepSpeed ZeRO, DDP, or a single process) and leaves everything in one run folder. A
step always means an optimizer step; a micro-batch is what one process feeds forward at once.
"""

import time
from dataclasses import replace

from common.errors import UsageError, one_line_errors
from model import ConfigError
from training.arguments import TrainingArguments, parse_arguments
from training.engine.failures import one_line_failures
from training.engine.launch import build_engine
from training.engine.main_process import on_main_process
from training.initial_weights import InitialWeights
from training.interruption import leave
from training.notebook import leave_as_found
from training.resume import starting_weights
from training.run import Run
from training.setup import open_splits, with_data
from training.start import start_run
from training.trackers import require_trackers


def main(argv: list[str] | None = None) -> None:
    """Train as the flags say: those in argv, and then the process lives on, or the command line's.

    A notebook calls it through `accelerate.notebook_launcher(main, args=(argv,))`.
    """
    program = TrainingArguments.program
    with one_line_errors(program, UsageError, ConfigError), leave_as_found(program, argv):
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
    """Everything that is there before the first step; None if the run is finished. Raises
    UsageError, ConfigError: this cannot be trained."""
    started = time.monotonic()  # --time_limit counts from here
    require_trackers(args.trackers)
    engine = build_engine(args)
    accelerator = engine.accelerator
    initial = on_main_process(
        accelerator, lambda: InitialWeights.find(starting_weights(args), model_settings)
    )
    prepared = on_main_process(accelerator, lambda: with_data(args, initial))
    args = replace(args, data=args.data or prepared.data)  # each process keeps its own flags
    train_set, val_set = open_splits(args, initial.max_seq_len, engine)
    sets = {"train_set": train_set, "val_set": val_set}
    return start_run(args, engine, initial, **sets, started=started)


if __name__ == "__main__":
    try:
        main()
    finally:
        leave()
