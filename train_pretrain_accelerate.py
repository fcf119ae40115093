"""Pretrain a small Llama-like model on packed tokens.

    accelerate launch --config_file accelerate_config.yaml train_pretrain_accelerate.py [flags]

Reads what `python -m scripts.prepare_data` wrote and leaves everything in one run folder. A step
always means an optimizer step; a micro-batch is what one process feeds forward at once.
"""

from training.arguments import TrainingArguments
from training.run import Run
from training.start import run_program


def main(argv: list[str] | None = None) -> None:
    """Train as the flags in argv say, from a notebook too; None takes those of the command line."""
    run_program(TrainingArguments, train, argv)


def train(run: Run) -> None:
    """Everything between the set-up and the finished run."""
    for step in run.steps():
        run.begin(step)  # learning rate
        for batch in run.micro_batches():
            with run.accumulate():
                loss = run.model(batch.tokens, batch.targets).loss
                run.backward(loss, batch)
        grad_norm = run.clip_gradients()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.end(step, grad_norm)  # log, validate, sample, save
    run.finish()  # leave weights and a report, unless it was told to stop before the end


if __name__ == "__main__":
    main()
