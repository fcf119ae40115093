"""Pretrain several models side by side on the same batches, to compare them.

    accelerate launch --config_file accelerate_config.yaml train_several_accelerate.py \\
      --model small.json --model large.json [flags for all models]

Each model has its own engine, random numbers and run folder. In float32 its losses equal, up to
rounding, the losses of a separate run of train_pretrain_accelerate.py. All models read the same
batches, because the order of the data does not depend on the model. All models are saved at the
same steps.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lm.common.errors import UsageError, reason
from lm.training.arguments import TrainingArguments, as_words, build_parser
from lm.training.resume import decided_arguments
from lm.training.run import Run
from lm.training.schedule import FROM_WEIGHTS
from lm.training.set_up import Model, run_program
from model.config import setting

# Training flags in which models may differ; model flags such as --dim may differ too. All models
# share the other flags, most of which concern the batches, the process, or when to log and save.
OWN = {
    *("run_name", "init_from", "deepspeed", "compile", "gradient_checkpointing"),
    *FROM_WEIGHTS,
    *("optimizer", "muon_learning_rate", "lr_schedule", "warmup_steps"),
    *("min_lr_ratio", "decay_fraction", "weight_decay", "beta1", "beta2", "muon_momentum"),
    *("grad_clip", "max_bad_steps", "sample_prompt", "sample_tokens"),
}


@dataclass
class SeveralArguments(TrainingArguments):
    """Flags of all models together. Raises UsageError for an invalid value."""

    program: ClassVar[str] = "train_several_accelerate.py"
    about: ClassVar[str] = __doc__.splitlines()[0]

    model: Sequence[str] = setting(
        (),
        'JSON file with flags of a model, such as {"dim": 256, "learning_rate": 1e-3}; once for '
        "each model; the file's name without .json is the default of run_name",
        group="models",
        repeated=True,
    )

    def __post_init__(self):
        super().__post_init__()
        for refused, said in (
            (not self.model, "pass --model FILE once for each model"),
            (self.run_name, '--run_name: give each model its own "run_name" in its file'),
            (self.resume not in (None, "auto"), "several models can only use --resume auto"),
            ({*self.trackers} - {"tensorboard"}, "several models can only use tensorboard or none"),
        ):
            if refused:
                raise UsageError(said)


def main(argv: list[str] | None = None) -> None:
    """Train with the flags in argv, for example in a notebook; None means the command line."""
    run_program(SeveralArguments, train, argv, read_models)


def train(first: Run) -> None:
    """Train all runs step by step from the first step to the last, then write the results."""
    runs = first.runs
    for step in first.steps():
        for run in runs.in_turn():
            run.begin(step)  # learning rate
            for batch in run.micro_batches():
                with run.accumulate():
                    out = run.model(batch.tokens, batch.targets)
                    run.backward(out.loss, batch, out.routing)
            grad_norm = run.update()  # clip the gradient; change the weights, if its norm is finite
            run.report(step, grad_norm)  # log, validate, sample
        runs.end(step)  # save all runs or none
    runs.finish()  # write weights and reports, or say how to resume runs that were stopped


def read_models(typed: dict) -> list[Model]:
    """Return the training arguments and model settings of each model. Raises UsageError if a file
    is unreadable or has invalid flags, or if models have the same name or different precisions."""
    models, shared = [], {name: value for name, value in typed.items() if name != "model"}
    for file in typed["model"]:
        try:
            words = as_words(json.loads(Path(file).read_text(encoding="utf-8")))
            own = {"run_name": Path(file).stem} | vars(build_parser(only=OWN).parse_args(words))
            models.append(decided_arguments(shared | own))
        except (OSError, ValueError, AttributeError) as error:
            raise UsageError(f"--model {file}: {reason(error)}") from error
    names = [args.run_name for args, _ in models]
    if len({args.dtype for args, _ in models}) > 1:
        raise UsageError("all models must have the same --dtype, which DeepSpeed files may decide")
    if len({*names}) < len(names):
        raise UsageError(f"two models have the same run_name: {', '.join(names)}")
    return models


if __name__ == "__main__":
    main()
