"""Every flag of the training programs: default, meaning and check in one place.

The model's flags come from `LMConfig`, the others from `TrainingArguments` or the subclass of a
program. `--help` and the tables in README.md (`python tests/flag_table.py` prints them) are made of
the same fields.
"""

import argparse
import math
import types
from collections.abc import Container
from dataclasses import dataclass, field, fields
from typing import ClassVar

from common.errors import UsageError
from common.parser import OneLineParser, UnlessGiven, is_text
from data.dataset import PackedDataset
from model import Transformer
from model.config import LMConfig, setting
from model.recompute import RECOMPUTE
from runs.find import PRETRAINING

DTYPES = ("bfloat16", "float16", "float32")
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
COMPILE = ("auto", "on", "off")
TRACKERS = ("tensorboard", "wandb", "swanlab", "none")
# What the value of a flag must be, in words and as a check.
AT_LEAST_0 = ("at least 0", lambda value: value >= 0)
AT_LEAST_1 = ("at least 1", lambda value: value >= 1)
POSITIVE = ("positive and finite", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = ("at least 0 and finite", lambda value: 0 <= value < math.inf)
SHARE = ("between 0 and 1", lambda value: 0 <= value <= 1)
BELOW_1 = ("at least 0 and below 1", lambda value: 0 <= value < 1)
SEED = ("at least 0 and below 2**32", lambda value: 0 <= value < 2**32)
FOLDER_NAME = (
    "a plain folder name",
    lambda name: name.strip(" .") and name.isprintable() and not set(name) & {"/", "\0"},
)
FILE_NAME = ("the name of a file", lambda name: name.strip() and "\0" not in name)
TEXT = ("text", is_text)
TRACKER_LIST = (
    f"a list of {', '.join(TRACKERS)}",
    lambda names: set(names.replace(" ", "").split(",")) <= set(TRACKERS),
)


@dataclass
class TrainingArguments:
    """How to train. Intervals and durations count optimizer steps.

    Raises UsageError: a value that cannot work; the message names the flag.
    """

    program: ClassVar[str] = PRETRAINING
    about: ClassVar[str] = "Pretrain a small Llama-like model on packed tokens."
    dataset: ClassVar[type] = PackedDataset  # which reads --data
    teacher = None  # a flag of distillation; with a type it would be a flag of every program
    logged: ClassVar[tuple[str, ...]] = ()  # means in the log besides the loss

    data: str = setting(
        "out/data/builtin", "folder made by scripts.prepare_data", group="data and output"
    )
    out_dir: str = setting("out/runs", "where run folders are made")
    run_name: str | None = setting(None, "name of the folder (default: date and time)", FOLDER_NAME)
    resume: str | None = setting(None, "'auto' for the newest checkpoint, or a run or a checkpoint")
    init_from: str | None = setting(
        None,
        "start from the weights of a run, a checkpoint or a folder, or 'auto' for the newest run "
        "of pretraining (RUN@best: at its lowest validation): "
        "the shape of the model is theirs, the optimizer new; a checkpoint that --resume finds is "
        "preferred",
    )
    keep_last: int = setting(3, "newest checkpoints to keep, besides the best; 0: all", AT_LEAST_0)
    time_limit: float | None = setting(None, "minutes after which to save and stop", POSITIVE)
    num_workers: int = setting(0, "extra processes that read batches; 0: none", AT_LEAST_0)

    epochs: int = setting(1, "passes over the data", AT_LEAST_1, group="training")
    max_steps: int | None = setting(None, "steps to train (default: decided by epochs)", AT_LEAST_1)
    batch_size: int = setting(8, "sequences per process in one micro-batch", AT_LEAST_1)
    accumulation_steps: int = setting(1, "micro-batches per optimizer step", AT_LEAST_1)
    optimizer: str = setting(
        "adamw", "muon: Muon for the matrices of the blocks, AdamW for the rest", choices=OPTIMIZERS
    )
    learning_rate: float = setting(5e-4, "peak learning rate of AdamW", POSITIVE)
    muon_learning_rate: float = setting(0.02, "peak learning rate of Muon, same schedule", POSITIVE)
    lr_schedule: str | None = setting(
        None, "after the warm-up (default: cosine)", choices=SCHEDULES
    )
    warmup_steps: int | None = setting(
        None, "linear warm-up (default: a twentieth of all steps, at most 2000)", AT_LEAST_0
    )
    min_lr_ratio: float = setting(0.1, "final learning rate as a share of the peak", SHARE)
    decay_fraction: float = setting(0.2, "share of steps that 'wsd' decays over, at the end", SHARE)
    weight_decay: float = setting(0.1, "decay of matrices, times the learning rate", NOT_NEGATIVE)
    beta1: float = setting(0.9, "AdamW's average of the gradient", BELOW_1)
    beta2: float = setting(0.95, "AdamW's average of its square", BELOW_1)
    muon_momentum: float = setting(0.95, "Muon's average of the gradient", BELOW_1)
    grad_clip: float = setting(1.0, "largest norm of the gradient; 0 leaves it as is", NOT_NEGATIVE)
    max_bad_steps: int = setting(
        20,
        "stop after so many steps in a row with a non-finite gradient, looked at every so many "
        "steps; float16's search for a loss scale counts",
        AT_LEAST_1,
    )
    dtype: str = setting("bfloat16", "precision of forward and backward", choices=DTYPES)
    tf32: bool = setting(
        False,
        "with float32, on NVIDIA GPUs from Ampere on: matrix products in TF32, which is faster and "
        "rounds factors to 11 bits",
    )
    compile: str = setting(
        "auto", "torch.compile by blocks; 'auto' where the run gains by it", choices=COMPILE
    )
    deepspeed: str | None = setting(
        None,
        "DeepSpeed's configuration, where the launcher is not told: a launch by deepspeed, "
        "torchrun or plain python",
        FILE_NAME,
        aliases=("--deepspeed_config",),
        # As in DeepSpeed's own programs: --deepspeed --deepspeed_config FILE
        alone="",
    )
    gradient_checkpointing: str = setting(
        "off",
        "compute blocks again in backward, as a whole or all but attention, and keep less for it; "
        "alone it means blocks",
        choices=RECOMPUTE,
        alone="blocks",
    )
    seed: int = setting(42, "of initial weights, order of the data, dropout and samples", SEED)

    log_interval: int = setting(10, "steps between log lines", AT_LEAST_1, group="reports")
    log_with: str = setting(
        "tensorboard", f"trackers, separated by commas: {', '.join(TRACKERS)}", TRACKER_LIST
    )
    eval_interval: int = setting(500, "steps between validations; 0: at the end only", AT_LEAST_0)
    eval_samples: int = setting(1024, "sequences to validate on, spread evenly; 0: all", AT_LEAST_0)
    save_interval: int = setting(
        1000,
        "steps between checkpoints, besides those at each best validation; 0: none",
        AT_LEAST_0,
    )
    save_minutes: float = setting(30.0, "minutes between checkpoints too; 0: none", NOT_NEGATIVE)
    profile: bool = setting(False, "measure and trace a step every profile_interval steps")
    profile_interval: int = setting(100, "steps between profiled steps", AT_LEAST_1)
    sample_interval: int = setting(0, "steps between samples; 0: at the end only", AT_LEAST_0)
    sample_prompt: str | None = setting(
        None, "prompt (default: how the validation text begins)", TEXT
    )
    sample_tokens: int = setting(100, "tokens of a sample", AT_LEAST_0)

    def __post_init__(self):
        for item in fields(self):
            value, must = getattr(self, item.name), item.metadata["must"]
            if must and value is not None and not must[1](value):
                raise UsageError(f"--{item.name} must be {must[0]}, not {value!r}")

    @property
    def mixed_precision(self) -> str:
        """--dtype by Accelerate's name."""
        return {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}[self.dtype]

    def global_batch(self, processes: int) -> int:
        """Return the sequences of an optimizer step, of all processes together."""
        return self.batch_size * self.accumulation_steps * processes

    def adapt(self, model: Transformer) -> None:
        """Change a new model in place, before it has its weights."""

    @property
    def trackers(self) -> list[str]:
        """The names in --log_with, without "none"."""
        return [name for name in self.log_with.replace(" ", "").split(",") if name != "none"]


def changed(name: str, default):
    """Return a field of TrainingArguments with another default."""
    (item,) = (item for item in fields(TrainingArguments) if item.name == name)
    return field(default=default, metadata=item.metadata)


def flags_of(dataclass_type):
    """Yield (field, group title) of every field that is a flag."""
    group = "model"
    for item in fields(dataclass_type):
        group = item.metadata.get("group", group)
        if item.metadata.get("flag", True):
            yield item, group


def build_parser(
    kind: type[TrainingArguments] = TrainingArguments, only: Container[str] | None = None
) -> argparse.ArgumentParser:
    """Return a parser of all flags of a program, or of the flags in `only` and the model's."""
    parser = OneLineParser(
        prog=f"python {kind.program}", description=kind.about, allow_abbrev=False
    )
    groups = {}
    training = [each for each in flags_of(kind) if not only or each[0].name in only]
    for item, title in [*training, *flags_of(LMConfig)]:
        group = groups.setdefault(title, parser.add_argument_group(title))
        # Defaults stay in the dataclasses, so that the parser returns what was typed.
        text = item.metadata["help"]
        if item.default is not None:
            text += f" (default: {show_default(item.default)})"
        options = {"default": argparse.SUPPRESS, "help": text}
        if item.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            kind = item.type.__args__[0] if isinstance(item.type, types.UnionType) else item.type
            choices = item.metadata.get("choices")
            metavar = None if choices else kind.__name__.upper()
            options |= {"type": kind, "choices": choices, "metavar": metavar}
        if (alone := item.metadata.get("alone")) is not None:  # the value of a flag without one
            options |= {"nargs": "?", "const": alone, "action": UnlessGiven}
        group.add_argument(f"--{item.name}", *item.metadata.get("aliases", ()), **options)
    # DeepSpeed's launcher appends it; the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser


def show_default(value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_arguments(
    argv: list[str] | None = None, kind: type[TrainingArguments] = TrainingArguments
) -> tuple[TrainingArguments, dict]:
    """Return the arguments of a program, and the settings of the model that were typed.

    The other settings are LMConfig's, or with --init_from those of the weights; the vocabulary
    comes with the data. Raises UsageError: unknown flags or values that cannot work. ConfigError: a
    model shape that cannot work.
    """
    return as_arguments(vars(build_parser(kind).parse_args(argv)), kind)


def as_arguments(
    values: dict, kind: type[TrainingArguments] = TrainingArguments
) -> tuple[TrainingArguments, dict]:
    """Do as `parse_arguments` with parsed flags; take the model's out of `values`."""
    values.pop("local_rank")
    names = [item.name for item, _ in flags_of(LMConfig)]
    model_settings = {name: values.pop(name) for name in names if name in values}
    args = kind(**values)
    if args.init_from is None:
        LMConfig(**model_settings)  # a shape that cannot work is refused before anything starts
    return args, model_settings
