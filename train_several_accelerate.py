"""Pretrain several models side by side on the same batches, to compare them.

    accelerate launch --config_file accelerate_config.yaml train_several_accelerate.py \\
      --model small.json --model large.json [flags for all of them]

The steps are those of pretraining, see train_pretrain_accelerate.py. Each model has an engine,
random numbers and a run folder of its own, and its losses are those of training it alone. The
models read the same batches and save at the same steps.
"""

from training.engine.failures import one_line_failures
from training.several import PROGRAM, Model, parse_models, set_up_several
from training.start import one_program


def main(argv: list[str] | None = None) -> None:
    """Train as the flags in argv say, from a notebook too; None takes those of the command line."""
    with one_program(PROGRAM, argv):
        models = parse_models(argv)
        with one_line_failures(*models[0]):
            train(models)


def train(models: list[Model]) -> None:
    """Everything between the flags and the finished runs."""
    runs = set_up_several(models)
    if runs is None:
        return
    for step in runs.steps():
        val_losses = {}
        for run in runs.in_turn():
            run.begin(step)  # learning rate
            for batch in run.micro_batches():
                with run.accumulate():
                    loss = run.model(batch.tokens, batch.targets).loss
                    run.backward(loss, batch)
            grad_norm = run.clip_gradients()
            run.optimizer.step()
            run.optimizer.zero_grad()
            val_losses[run] = run.report(step, grad_norm)  # log, validate, sample
        if runs.end(step, val_losses):  # save, all of them or none; true: asked to stop
            return
    runs.finish()


if __name__ == "__main__":
    main()
