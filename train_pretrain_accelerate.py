"""Pretrain a small Llama-like model on packed tokens.

    accelerate launch --config_file accelerate_config.yaml train_pretrain_accelerate.py [flags]

The program reads the data that `python -m scripts.prepare_data` wrote, and writes a run folder. A
step is an optimizer step. A micro-batch is the sequences of one forward pass on one process.
"""

from lm.training.arguments import TrainingArguments
from lm.training.run import Run
from lm.training.set_up import run_program


def main(argv: list[str] | None = None) -> None:
    """Train with the flags in argv, for example in a notebook; None means the command line."""
    run_program(TrainingArguments, train, argv)


def train(run: Run) -> None:
    """Train from the run's first step to its last, then write the results."""
    for step in run.steps():
        run.begin(step)  # learning rate
        for batch in run.micro_batches():
            with run.accumulate():
                out = run.model(batch.tokens, batch.targets)
                run.backward(out.loss, batch, out.routing)
        grad_norm = run.update()  # clip the gradient; change the weights, if its norm is finite
        run.end(step, grad_norm)  # log, validate, sample, save
    run.finish()  # write weights and a report, or say how to resume a run that was stopped


if __name__ == "__main__":
    main()
