"""Every flag of the training programs: default, meaning and check in one place.

The model's flags are the fields of `LMConfig`. `python tests/flag_table.py` prints README's tables.
"""

import argparse
import math
import types
from collections.abc import Container
from dataclasses import dataclass, field, fields
from typing import ClassVar

from common.errors import UsageError
from common.parser import OneLineParser, UnlessGiven, is_text
from data.dataset import ConversationSet, PackedDataset, TokenStream
from data.shards import read_description
from model import Transformer
from model.config import LMConfig, setting
from model.lora import add_lora
from model.recompute import RECOMPUTE
from storage.find import DISTILLATION, PRETRAINING

DTYPES = ("bfloat16", "float16", "float32")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
TRACKERS = ("tensorboard", "wandb", "swanlab", "none")
# What the value of a flag must be, in words and as a check.
AT_LEAST_0 = ("at least 0 and finite", lambda value: 0 <= value < math.inf)
AT_LEAST_1 = ("at least 1", lambda value: value >= 1)
POSITIVE = ("positive and finite", lambda value: 0 < value < math.inf)
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
    """How to train. Intervals count optimizer steps. Raises UsageError: a value cannot work."""

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
        "weights to begin with: a run, RUN@best (at its lowest validation), a checkpoint, a folder "
        "or 'auto', the newest run of pretraining; --resume goes first",
    )
    keep_last: int = setting(3, "newest checkpoints to keep, besides the best; 0: all", AT_LEAST_0)
    time_limit: float | None = setting(None, "minutes after which to save and stop", POSITIVE)
    num_workers: int = setting(0, "extra processes that read batches; 0: none", AT_LEAST_0)

    epochs: int = setting(1, "passes over the data", AT_LEAST_1, group="training")
    max_steps: int | None = setting(None, "steps to train (default: decided by epochs)", AT_LEAST_1)
    batch_size: int = setting(8, "sequences per process in one micro-batch", AT_LEAST_1)
    accumulation_steps: int = setting(1, "micro-batches per optimizer step", AT_LEAST_1)
    optimizer: str = setting(
        "adamw", "muon: for the matrices of blocks, AdamW for the rest", choices=("adamw", "muon")
    )
    learning_rate: float = setting(5e-4, "peak learning rate of AdamW", POSITIVE)
    muon_learning_rate: float = setting(0.02, "peak learning rate of Muon, same schedule", POSITIVE)
    lr_schedule: str | None = setting(None, "after warm-up (default: cosine)", choices=SCHEDULES)
    warmup_steps: int | None = setting(None, "default: steps / 20, at most 2000", AT_LEAST_0)
    min_lr_ratio: float = setting(0.1, "final learning rate as a share of the peak", SHARE)
    decay_fraction: float = setting(0.2, "share of steps that 'wsd' decays over, at the end", SHARE)
    weight_decay: float = setting(0.1, "decay of matrices, times the learning rate", AT_LEAST_0)
    beta1: float = setting(0.9, "AdamW's average of the gradient", BELOW_1)
    beta2: float = setting(0.95, "AdamW's average of its square", BELOW_1)
    muon_momentum: float = setting(0.95, "Muon's average of the gradient", BELOW_1)
    grad_clip: float = setting(1.0, "largest norm of the gradient; 0 leaves it as is", AT_LEAST_0)
    max_bad_steps: int = setting(
        20, "stop after so many steps in a row with a non-finite gradient", AT_LEAST_1
    )
    dtype: str = setting("bfloat16", "precision of forward and backward", choices=DTYPES)
    tf32: bool = setting(False, "float32 on NVIDIA GPUs: faster matrix products, of 11 bits")
    compile: str = setting(
        "auto", "torch.compile; 'auto': where it pays", choices=("auto", "on", "off")
    )
    deepspeed: str | None = setting(
        None,
        "DeepSpeed's configuration, for a launch by deepspeed, torchrun or plain python",
        FILE_NAME,
        aliases=("--deepspeed_config",),
        alone="",  # as in DeepSpeed's own programs: --deepspeed --deepspeed_config FILE
    )
    gradient_checkpointing: str = setting(
        "off", "compute blocks again in backward: less memory", choices=RECOMPUTE, alone="blocks"
    )
    seed: int = setting(42, "of initial weights, order of the data, dropout and samples", SEED)

    log_interval: int = setting(10, "steps between log lines", AT_LEAST_1, group="reports")
    log_with: str = setting(
        "tensorboard", f"trackers, separated by commas: {', '.join(TRACKERS)}", TRACKER_LIST
    )
    eval_interval: int = setting(500, "steps between validations; 0: at the end only", AT_LEAST_0)
    eval_samples: int = setting(1024, "sequences to validate on, spread evenly; 0: all", AT_LEAST_0)
    save_interval: int = setting(
        1000, "steps between checkpoints, besides each best validation's; 0: none", AT_LEAST_0
    )
    save_minutes: float = setting(30.0, "minutes between checkpoints too; 0: none", AT_LEAST_0)
    profile: bool = setting(False, "measure and trace a step every profile_interval steps")
    profile_interval: int = setting(100, "steps between profiled steps", AT_LEAST_1)
    sample_interval: int = setting(0, "steps between samples; 0: at the end only", AT_LEAST_0)
    sample_prompt: str | None = setting(None, "prompt (default: that of the data)", TEXT)
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
        """Return the sequences of an optimizer step on all processes together."""
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


@dataclass
class SFTArguments(TrainingArguments):
    """Flags of fine-tuning. Raises UsageError: values or flags that cannot work together."""

    program: ClassVar[str] = "train_sft_accelerate.py"
    about: ClassVar[str] = "Fine-tune a model on conversations, so that it answers."
    dataset: ClassVar[type] = ConversationSet

    data: str | None = setting(
        None, "prepared conversations (default: made of --conversations)", group="data and output"
    )
    init_from: str = changed("init_from", "auto")
    epochs: int = changed("epochs", 3)
    learning_rate: float = changed("learning_rate", 1e-4)

    lora_dim: int | None = setting(
        None, "train adapters (LoRA) of this inner dimension alone", AT_LEAST_1, group="adapters"
    )
    lora_alpha: float = setting(16.0, "adapters are scaled by lora_alpha / lora_dim", POSITIVE)
    lora_module_name: str = setting("layers", "part of the names of the layers that have one")
    only_optimize_lora: bool = setting(False, "freeze embedding, norms and output too")

    conversations: str = setting(
        "builtin",
        "file or folder of conversations, prepared at start; 'builtin': questions about Python",
        FILE_NAME,
        group="fine-tuning",
    )
    prepare_flags: str = setting(
        "", "flags of scripts.prepare_data for these: --prepare_flags='--skip_bad_lines'"
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("lora_alpha", "lora_module_name", "only_optimize_lora"):
            if self.lora_dim is None and getattr(self, name) != getattr(SFTArguments, name):
                raise UsageError(f"--{name} is about adapters: pass --lora_dim too, such as 8")

    def adapt(self, model: Transformer) -> None:
        """Add the adapters of --lora_dim, if any. Raises ConfigError: see `add_lora`."""
        if self.lora_dim is not None:
            add_lora(
                model,
                dim=self.lora_dim,
                alpha=self.lora_alpha,
                module_name=self.lora_module_name,
                only_lora=self.only_optimize_lora,
            )


@dataclass
class DistillationArguments(TrainingArguments):
    """Flags of distillation. Raises UsageError: a value cannot work."""

    program: ClassVar[str] = DISTILLATION
    about: ClassVar[str] = "Train a model to expect what a trained, larger one expects."
    logged: ClassVar[tuple[str, ...]] = ("hard_loss", "soft_loss", "agreement")

    data: str | None = setting(
        None, "prepared text or conversations (default: the teacher's)", group="data and output"
    )
    teacher: str = setting(
        "auto",
        "to learn from: a run or RUN@best, a checkpoint, a folder (Hugging Face's too), or 'auto'",
        FILE_NAME,
        group="distillation",
    )
    teacher_config: str | None = setting(
        None, "DeepSpeed file to divide the teacher: configs/zero3_inference.json", FILE_NAME
    )
    alpha: float = setting(0.5, "share of the hard loss, that of the data's own tokens", SHARE)
    temperature: float = setting(2.0, "divides both models' logits in the soft loss", POSITIVE)
    kl: str = setting("forward", "direction of the KL divergence", choices=("forward", "reverse"))

    @property
    def dataset(self) -> type[TokenStream]:
        """For the kind of data that --data holds. Raises DataError: it holds none."""
        kinds = {each.kind: each for each in (PackedDataset, ConversationSet)}
        return kinds[read_description(self.data)["kind"]]


KINDS = TrainingArguments, SFTArguments, DistillationArguments
PROGRAMS = {kind.program: kind for kind in KINDS}


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
    """Return a parser of a program's flags (those in `only`) and the model's. It returns those that
    were typed: the defaults are in the dataclasses."""
    prog = f"python {kind.program}"
    parser = OneLineParser(prog=prog, description=kind.about, allow_abbrev=False)
    groups = {}
    training = [each for each in flags_of(kind) if not only or each[0].name in only]
    for item, title in [*training, *flags_of(LMConfig)]:
        group = groups.setdefault(title, parser.add_argument_group(title))
        text = item.metadata["help"]
        if item.default is not None:
            text += f" (default: {show_default(item.default)})"
        options = {"default": argparse.SUPPRESS, "help": text}
        if item.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif item.metadata.get("repeated"):
            options |= {"action": "append", "metavar": "FILE"}
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
    """Return the arguments of a program, and the settings of the model that were typed, which
    `prepare` checks. Raises UsageError: unknown flags, or values that cannot work."""
    return as_arguments(vars(build_parser(kind).parse_args(argv)), kind)


def as_arguments(
    values: dict, kind: type[TrainingArguments] = TrainingArguments
) -> tuple[TrainingArguments, dict]:
    """Do as `parse_arguments` with parsed flags; take the model's out of `values`."""
    values.pop("local_rank")
    names = [item.name for item, _ in flags_of(LMConfig)]
    model_settings = {name: values.pop(name) for name in names if name in values}
    return kind(**values), model_settings
