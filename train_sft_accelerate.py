"""Fine-tune a model on conversations, so that it answers.

    accelerate launch --config_file accelerate_config.yaml train_sft_accelerate.py [flags]

The steps are those of pretraining, see train_pretrain_accelerate.py. What differs: the weights to
begin with (--init_from, by default the newest run's), rows that are whole conversations, and that
only the tokens of answers count in the loss.
"""

from training.arguments import SFTArguments
from training.start import run_program, set_up


def main(argv: list[str] | None = None) -> None:
    """Train as the flags in argv say, from a notebook too; None takes those of the command line."""
    run_program(SFTArguments, train, argv)


def train(args: SFTArguments, model_settings: dict) -> None:
    """Everything between the flags and the finished run."""
    run = set_up(args, model_settings)
    if run is None:
        return
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
        if run.end(step, grad_norm):  # log, validate, sample, save; true: told to stop
            return
    run.finish()


if __name__ == "__main__":
    main()
