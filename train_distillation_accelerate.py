"""Distil a model: train a smaller one to expect what a trained one, its teacher, expects.

    accelerate launch --config_file accelerate_config.yaml train_distillation_accelerate.py [flags]

The steps are those of pretraining, see train_pretrain_accelerate.py. What differs: the teacher
(--teacher, by default the newest run) reads each micro-batch too, and the loss compares both
models' logits.
"""

from training.distillation_arguments import DistillationArguments
from training.distillation_loss import distillation_loss
from training.interruption import leave
from training.program import run_program
from training.start import set_up


def main(argv: list[str] | None = None) -> None:
    """Train as the flags in argv say; None takes those of the command line.

    A notebook calls it through `accelerate.notebook_launcher(main, args=(argv,))` and goes on after
    it.
    """
    run_program(DistillationArguments, train, argv)


def train(args: DistillationArguments, model_settings: dict) -> None:
    """Everything between the flags and the finished run."""
    run = set_up(args, model_settings)
    if run is None:
        return
    how = {"alpha": args.alpha, "temperature": args.temperature, "kl": args.kl}
    how |= {"vocab_size": run.train_set.vocab_size, "compiled": run.built.compilation.on}
    for step in run.steps():
        run.begin(step)  # learning rate
        for tokens, targets in run.micro_batches():
            with run.accumulate():
                theirs = run.teacher(tokens)
                ours = run.model(tokens).logits
                loss, hard, soft, agreement = distillation_loss(ours, theirs, targets, **how)
                run.backward(loss, hard_loss=hard, soft_loss=soft, agreement=agreement)
        run.update()  # clip, optimizer step
        if run.end(step):  # log, validate, sample, save; true: told to stop
            return
    run.finish()


if __name__ == "__main__":
    try:
        main()
    finally:
        leave()
