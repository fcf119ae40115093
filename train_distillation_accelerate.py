"""Train a small model, the student, to predict the probabilities of a trained model, the teacher.

    accelerate launch --config_file accelerate_config.yaml train_distillation_accelerate.py [flags]

The loop differs from pretraining in two ways: the teacher (--teacher, by default the newest
pretraining run) also reads each micro-batch, and the loss also compares the models' logits.
"""

import torch

from lm.training.arguments import DistillationArguments
from lm.training.distillation import distillation_loss
from lm.training.run import Run
from lm.training.set_up import run_program


def main(argv: list[str] | None = None) -> None:
    """Train with the flags in argv, for example in a notebook; None means the command line."""
    run_program(DistillationArguments, train, argv)


def train(run: Run) -> None:
    """Train from the run's first step to its last, then write the results."""
    args, compiled = run.args, run.work.compiled
    vocab_size = run.inputs.train_set.vocab_size
    for step in run.steps():
        run.begin(step)  # learning rate
        for batch in run.micro_batches():
            with run.accumulate():
                with torch.no_grad():
                    teacher_logits = run.teacher(batch.tokens, starts=batch.starts).logits
                out = run.model(batch.tokens, starts=batch.starts)
                loss, hard, soft, agreement = distillation_loss(
                    out.logits, teacher_logits, batch.targets, args, vocab_size, compiled
                )
                run.backward(
                    loss, batch, out.routing, hard_loss=hard, soft_loss=soft, agreement=agreement
                )
        grad_norm = run.update()  # clip the gradient; change the weights, if its norm is finite
        run.end(step, grad_norm)  # log, validate, sample, save
    run.finish()  # write weights and a report, or say how to resume a run that was stopped


if __name__ == "__main__":
    main()
