"""Fine-tune a model on conversations, so that it answers.

    accelerate launch --config_file accelerate_config.yaml train_sft_accelerate.py [flags]

Training starts from the weights of --init_from (default: the newest pretraining run). Unlike in
pretraining, a sequence holds whole conversations, each of which sees only itself, and only answer
tokens count in the loss.
"""

from lm.training.arguments import SFTArguments
from lm.training.run import Run
from lm.training.set_up import run_program


def main(argv: list[str] | None = None) -> None:
    """Train with the flags in argv, for example in a notebook; None means the command line."""
    run_program(SFTArguments, train, argv)


def train(run: Run) -> None:
    """Train from the run's first step to its last, then write the results."""
    if run.first_step == 1:  # show how the model answers before it is trained
        run.validate(0)
        run.write_sample(0)
    for step in run.steps():
        run.begin(step)  # learning rate
        for batch in run.micro_batches():
            with run.accumulate():
                # Only answers are targets, and a conversation sees none of the others.
                out = run.model(batch.tokens, batch.targets, starts=batch.starts)
                run.backward(out.loss, batch, out.routing)
        grad_norm = run.update()  # clip the gradient; change the weights, if its norm is finite
        run.end(step, grad_norm)  # log, validate, sample, save
    run.finish()  # write weights and a report, or say how to resume a run that was stopped


if __name__ == "__main__":
    main()
