"""Pretrain a small Llama-like model on packed tokens.

    accelerate launch --config_file accelerate_config.yaml train_pretrain_accelerate.py [flags]

Reads what `python -m scripts.prepare_data` wrote, trains through Accelerate on whatever engine the
launcher chose (DeepSpeed ZeRO, DDP, or a single process) and leaves everything in one run folder. A
step always means an optimizer step; a micro-batch is what one process feeds forward at once.
"""

from common.errors import UsageError, one_line_errors
from model import ConfigError
from training.arguments import TrainingArguments, parse_arguments
from training.engine.failures import one_line_failures
from training.interruption import leave
from training.notebook import leave_as_found
from training.start import set_up


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


if __name__ == "__main__":
    try:
        main()
    finally:
        leave()
