"""The flags of train_several_accelerate.py: those of pretraining, and files with a model's own."""

import json
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from common.errors import UsageError
from model import ConfigError, LMConfig
from training.arguments import TrainingArguments, as_arguments, build_parser, flags_of

PROGRAM = "train_several_accelerate.py"
ABOUT = "Pretrain several small Llama-like models side by side, on the same batches."
# Flags of training in which models may differ, besides the shape. All others are about the batches,
# the process, or when something is done, which is done for all at once.
OWN = frozenset(
    (
        *("run_name", "init_from", "deepspeed", "compile", "gradient_checkpointing"),
        *("optimizer", "learning_rate", "muon_learning_rate", "lr_schedule", "warmup_steps"),
        *("min_lr_ratio", "decay_fraction", "weight_decay", "beta1", "beta2", "muon_momentum"),
        *("grad_clip", "max_bad_steps", "sample_prompt", "sample_tokens"),
    )
)
# Whose Python packages have one run in a process.
ONE_PER_PROCESS = ("wandb", "swanlab")
ALL_FLAGS = [*flags_of(TrainingArguments), *flags_of(LMConfig)]
SWITCHES = {item.name for item, _ in ALL_FLAGS if item.type is bool}


class Model(NamedTuple):
    args: TrainingArguments
    settings: dict  # of its shape, those that were given


def parse_models(argv: list[str] | None = None) -> list[Model]:
    """What each --model is to be trained with.

    Raises UsageError, ConfigError: unknown flags or values that cannot work, and models that cannot
    be trained together; names the file.
    """
    parser = build_parser()
    parser.prog, parser.description = f"python {PROGRAM}", ABOUT
    parser.add_argument_group("models").add_argument(
        "--model",
        action="append",
        required=True,
        metavar="FILE",
        help="a JSON file with flags of one model, without dashes, such as "
        '{"dim": 256, "learning_rate": 1e-3, "deepspeed": "configs/zero3.json"}; once for each '
        "model; run_name is the file's name unless it is given there",
    )
    given = vars(parser.parse_args(argv))
    files = given.pop("model")
    if "run_name" in given:
        raise UsageError('--run_name: each model has one of its own, "run_name" in its file')
    models = [_read(file, given) for file in files]
    _require_shared(dict(zip(files, models, strict=True)), models[0])
    names = {}
    for file, (args, _) in zip(files, models, strict=True):
        if args.run_name in names:
            raise UsageError(
                f"{names[args.run_name]} and {file} both have the run_name {args.run_name!r}: "
                "give each model one of its own"
            )
        names[args.run_name] = file
    return models


def _read(file: str, given: dict) -> Model:
    """A model's flags out of its file, besides those that are given for all."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        flags = json.loads(text, object_pairs_hook=_each_once)
    except OSError as error:
        raise UsageError(f"--model {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--model {file}: not JSON: {error}") from error
    if not isinstance(flags, dict):
        raise UsageError(
            f'--model {file}: needs flags and their values in braces, such as {{"dim": 128}}'
        )
    try:
        words = [_word(name, value) for name, value in flags.items()]
        own = {"run_name": Path(file).stem} | vars(build_parser().parse_args(words))
        if own.pop("local_rank") is not None:
            raise UsageError('"local_rank" is what a launcher says, and no flag of a model')
        for name in own.keys() & given.keys():
            if own[name] != given[name]:
                raise UsageError(
                    f'"{name}" is {own[name]!r} there, and --{name} {given[name]} holds for all: '
                    "leave one of them out"
                )
        return Model(*as_arguments(own | given))
    except (UsageError, ConfigError) as error:
        raise type(error)(f"{file}: {error}") from error


def _each_once(pairs: list[tuple[str, object]]) -> dict:
    """An object of JSON, which may say everything but once. Raises ValueError: it does not."""
    found = dict(pairs)
    for name in found:
        if sum(name == other for other, _ in pairs) > 1:
            raise ValueError(f'"{name}" stands there twice')
    return found


def _word(name: str, value) -> str:
    """A flag and its value as they are typed."""
    if isinstance(value, list | dict | None):
        raise UsageError(f'"{name}" must be one value, not {json.dumps(value)}')
    if name in SWITCHES and isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _require_shared(models: dict[str, Model], first: Model) -> None:
    """Raises UsageError: what has to be the same for all models is not, or goes with one alone."""
    args = first.args
    if args.resume not in (None, "auto"):
        raise UsageError(
            f"--resume {args.resume}: several models take --resume auto, and go on from the newest "
            "step of which all of them have a checkpoint"
        )
    for name in args.trackers:
        if name in ONE_PER_PROCESS:
            raise UsageError(
                f"--log_with {name}: it takes one run per process; several models have tensorboard"
            )
    shared = [item.name for item in fields(args) if item.name not in OWN]
    first_file, *_ = models
    for file, model in models.items():
        facts = [
            {name: getattr(each.args, name) for name in shared}
            | {"max_seq_len": each.settings.get("max_seq_len", LMConfig.max_seq_len)}
            for each in (first, model)
        ]
        for name, one in facts[0].items():
            of_weights = name == "max_seq_len" and (args.init_from or model.args.init_from)
            if one != facts[1][name] and not of_weights:
                raise UsageError(
                    f"--{name} must be the same for all models: it is {one!r} in {first_file} and "
                    f"{facts[1][name]!r} in {file}"
                )
