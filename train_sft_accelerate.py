"""Fine-tune a model on conversations, so that it answers.

    accelerate launch --config_file accelerate_config.yaml train_sft_accelerate.py [flags]

Unlike pretraining it begins with weights (--init_from, by default the newest run's), its rows are
whole conversations, and only the tokens of answers count in the loss.
"""

from training.arguments import SFTArguments
from training.run import Run
from training.start import run_program


def main(argv: list[str] | None = None) -> None:
    """Train as the flags in argv say, from a notebook too; None takes those of the command line."""
    run_program(SFTArguments, train, argv)


def train(run: Run) -> None:
    """Everything between the set-up and the finished run."""
    if run.first_step == 1:  # how it answers before
        run.validate(0)
        run.write_sample(0)
    for step in run.steps():
        run.begin(step)  # learning rate
        for batch in run.micro_batches():
            with run.accumulate():
                loss = run.model(batch.tokens, batch.targets).loss  # of the answers alone
                run.backward(loss, batch)
        grad_norm = run.clip_gradients()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.end(step, grad_norm)  # log, validate, sample, save
    run.finish()  # leave weights and a report, unless it was told to stop before the end


if __name__ == "__main__":
    main()
