"""The flags of pretraining, fine-tuning and distillation: default, meaning and check of each flag.

The model's flags are fields of `LMConfig`. tests/flag_table.py prints the tables of docs/flags.md.
"""

import argparse
import math
import types
from collections.abc import Container
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from lm.common.errors import UsageError
from lm.common.parser import OneLineParser, is_text
from lm.data.conversation_set import ConversationSet
from lm.data.dataset import PackedDataset, TokenStream
from lm.data.shards import read_description
from lm.storage.find import PRETRAINING
from lm.training.schedule import FINE_TUNING_RATE, FROM_WEIGHTS, default_rates
from model import Transformer
from model.config import LMConfig, setting
from model.lora import LoRA, add_lora
from model.recompute import RECOMPUTE

DTYPES = ("bfloat16", "float16", "float32")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
TRACKERS = ("tensorboard", "wandb", "swanlab", "none")
# Conditions on the value of a flag: (words for the error message, check).
AT_LEAST_0 = ("at least 0 and finite", lambda value: 0 <= value < math.inf)
AT_LEAST_1 = ("at least 1", lambda value: value >= 1)
POSITIVE = ("positive and finite", lambda value: 0 < value < math.inf)
SHARE = ("between 0 and 1", lambda value: 0 <= value <= 1)
BELOW_1 = ("at least 0 and below 1", lambda value: 0 <= value < 1)
SEED = ("at least 0 and below 2**32", lambda value: 0 <= value < 2**32)
FOLDER_NAME = ("a plain folder name", lambda x: x.strip(" .") and x.isprintable() and "/" not in x)
PATH = ("a path", lambda path: path.strip() and "\0" not in path)
DEEPSPEED_FILE = ("followed by a file, as in --deepspeed ds_config.json", PATH[1])
TEXT = ("text", is_text)
TRACKER_LIST = (
    f"a list of {', '.join(TRACKERS)}",
    lambda names: set(names.replace(" ", "").split(",")) <= set(TRACKERS),
)


@dataclass
class TrainingArguments:
    """Flags of pretraining. "Steps" are optimizer steps. Raises UsageError for an invalid value."""

    program: ClassVar[str] = PRETRAINING
    about: ClassVar[str] = "Pretrain a small Llama-like model on packed tokens."
    dataset: ClassVar[type] = PackedDataset  # the class that reads --data
    teacher = None  # only distillation has this flag; an annotation would make it a field here
    logged: ClassVar[tuple[str, ...]] = ()  # names of averages that are logged after the loss

    data: str = setting(
        "out/data/builtin", "folder that scripts.prepare_data made", group="data and output"
    )
    out_dir: str = setting("out/runs", "folder in which the run folders are created")
    run_name: str | None = setting(None, "run folder's name (default: date and time)", FOLDER_NAME)
    resume: str | None = setting(None, "continue a run, a checkpoint or 'auto' (newest run)")
    init_from: str | None = setting(
        None,
        "initial weights, which decide the model's shape: a run, RUN@best (lowest validation "
        "loss), a checkpoint, a folder or 'auto' (newest pretraining run); resumed runs ignore it",
    )
    keep_last: int = setting(3, "newest checkpoints to keep (and the best); 0: all", AT_LEAST_0)
    time_limit: float | None = setting(None, "minutes after which to save and stop", POSITIVE)
    num_workers: int = setting(0, "extra processes that read batches; 0: none", AT_LEAST_0)
    threads: int | None = setting(
        None, "CPU threads per process (default: OMP_NUM_THREADS or its share of cores)", AT_LEAST_1
    )

    epochs: int = setting(1, "passes over the text or conversations", AT_LEAST_1, group="training")
    max_steps: int | None = setting(None, "steps of the run (default: from --epochs)", AT_LEAST_1)
    batch_size: int = setting(8, "sequences per process in one micro-batch", AT_LEAST_1)
    accumulation_steps: int = setting(1, "micro-batches per optimizer step", AT_LEAST_1)
    optimizer: str = setting(
        "adamw", "optimizer of the blocks' matrices (AdamW for the rest)", choices=("adamw", "muon")
    )
    learning_rate: float | None = setting(
        None,
        "peak learning rate of AdamW (default: 0.576 / dim in a new model, beside Muon "
        "0.23 / √dim, 0.34 / √dim if untied; 5e-4 from existing weights)",
        POSITIVE,
    )
    embedding_lr_factor: float | None = setting(
        None,
        "the embedding's learning rate, as a multiple of AdamW's (default: 10 in a new model, 3 "
        "beside Muon; 1 if tied beside Muon, from weights, or if --learning_rate is typed)",
        POSITIVE,
    )
    output_lr_factor: float | None = setting(
        None,
        "learning rate of an untied output layer, as a multiple of AdamW's (default: 4 in a new "
        "model, 0.5 beside Muon; 1 from existing weights, or if --learning_rate is typed)",
        POSITIVE,
    )
    muon_learning_rate: float = setting(0.02, "peak learning rate of Muon, same schedule", POSITIVE)
    lr_schedule: str = setting("cosine", "decay after warm-up", choices=SCHEDULES)
    warmup_steps: int | None = setting(None, "warm-up steps (default: by a share)", AT_LEAST_0)
    warmup_fraction: float | None = setting(
        None,
        "warm-up as a share of all steps, at most 2000 steps (default: 0.25 in a new model, 0.05 "
        "beside Muon, from weights, or if --learning_rate is typed)",
        SHARE,
    )
    min_lr_ratio: float = setting(0.1, "final learning rate as a share of the peak", SHARE)
    decay_fraction: float = setting(0.2, "'wsd' decays in this last share of all steps", SHARE)
    weight_decay: float = setting(0.1, "a step multiplies matrices by 1 - rate × this", AT_LEAST_0)
    beta1: float = setting(0.9, "decay rate of AdamW's running mean of gradients", BELOW_1)
    beta2: float = setting(0.95, "decay rate of AdamW's running mean of squared gradients", BELOW_1)
    muon_momentum: float = setting(0.95, "decay rate of Muon's running mean of gradients", BELOW_1)
    grad_clip: float = setting(1.0, "clip the gradient to this norm; 0: no clipping", AT_LEAST_0)
    max_bad_steps: int = setting(20, "stop after so many non-finite gradients in a row", AT_LEAST_1)
    dtype: str = setting("bfloat16", "precision of forward and backward", choices=DTYPES)
    tf32: bool = setting(False, "faster float32 matrix products on NVIDIA GPUs, with TF32 inputs")
    compile: str = setting(
        "auto", "torch.compile; 'auto' compiles long runs only", choices=("auto", "on", "off")
    )
    deepspeed: str | None = setting(
        None,
        "DeepSpeed's configuration file, for a launch by deepspeed, torchrun or plain python",
        DEEPSPEED_FILE,
        aliases=("--deepspeed_config",),
        alone="",  # as in DeepSpeed's own programs: --deepspeed --deepspeed_config FILE
    )
    coalesce_reduction: bool = setting(
        True,
        "ZeRO-2: keep whole gradients on each process while micro-batches accumulate, and reduce "
        "them once per step, if memory allows",
    )
    gradient_checkpointing: str = setting(
        "off", "save memory by recomputing blocks in backward", choices=RECOMPUTE, alone="blocks"
    )
    sampled_softmax: int = setting(1, "N: loss over targets and 1/N of other pieces", AT_LEAST_1)
    token_noise: float = setting(0.0, "share of input tokens replaced at random", BELOW_1)
    seed: int = setting(42, "seed of initial weights, data order, dropout and samples", SEED)

    log_interval: int = setting(10, "steps between log lines", AT_LEAST_1, group="reports")
    log_with: str = setting(
        "tensorboard", f"trackers, separated by commas: {', '.join(TRACKERS)}", TRACKER_LIST
    )
    eval_interval: int = setting(500, "steps between validations; 0: only at the end", AT_LEAST_0)
    eval_samples: int = setting(1024, "sequences to validate on, spread evenly; 0: all", AT_LEAST_0)
    save_interval: int = setting(
        1000,
        "steps between regular checkpoints; 0: none. The step with the lowest validation loss "
        "and the last step are always saved; save_minutes adds more",
        AT_LEAST_0,
    )
    save_minutes: float = setting(30.0, "maximum minutes between saves; 0: no limit", AT_LEAST_0)
    profile: bool = setting(False, "measure and trace one step in every profile_interval steps")
    profile_interval: int = setting(100, "steps between profiled steps", AT_LEAST_1)
    sample_interval: int = setting(0, "steps between samples; 0: none while training", AT_LEAST_0)
    sample_prompt: str | None = setting(None, "prompt (default: start of validation data)", TEXT)
    sample_tokens: int = setting(100, "maximum tokens to generate for a sample", AT_LEAST_0)

    def __post_init__(self):
        vars(self).update({k: v for k, v in FROM_WEIGHTS.items() if getattr(self, k) is None})
        for item in fields(self):
            value, must = getattr(self, item.name), item.metadata["must"]
            if must and value is not None and not must[1](value):
                raise UsageError(f"--{item.name} must be {must[0]}, not {value!r}")

    @property
    def mixed_precision(self) -> str:
        """Accelerate's name for --dtype."""
        return {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}[self.dtype]

    @property
    def matrix_precision(self) -> str:
        """The precision of matrix products, one of lm.engine.hardware.PRECISIONS."""
        return "tf32" if self.tf32 else self.mixed_precision.replace("no", "fp32")

    def global_batch(self, processes: int) -> int:
        """Return the number of sequences in an optimizer step, on all processes together."""
        return self.batch_size * self.accumulation_steps * processes

    def total_steps(self, n_samples: int, processes: int) -> int:
        """Return the number of optimizer steps: --max_steps, or computed from --epochs."""
        return self.max_steps or math.ceil(self.epochs * n_samples / self.global_batch(processes))

    def adapt(self, model: Transformer) -> None:
        """Add adapters to a new model before its weights are loaded. Only fine-tuning adds any."""

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers in --log_with, without "none"."""
        return [name for name in self.log_with.replace(" ", "").split(",") if name != "none"]


def changed(name: str, default):
    """Return the field `name` of TrainingArguments with another default."""
    (item,) = (item for item in fields(TrainingArguments) if item.name == name)
    return field(default=default, metadata=item.metadata)


@dataclass
class SFTArguments(TrainingArguments):
    """Flags of fine-tuning. Raises UsageError if a value is invalid or contradicts another."""

    program: ClassVar[str] = "train_sft_accelerate.py"
    about: ClassVar[str] = "Fine-tune a model on conversations, so that it answers."
    dataset: ClassVar[type] = ConversationSet

    data: str | None = setting(
        None, "folder of prepared data (default: from --conversations)", group="data and output"
    )
    init_from: str = changed("init_from", "auto")
    epochs: int = changed("epochs", 3)
    learning_rate: float = setting(FINE_TUNING_RATE, "peak learning rate of AdamW", POSITIVE)

    lora_dim: int | None = setting(
        None, "rank of LoRA adapters; adapted matrices are frozen", AT_LEAST_1, group="adapters"
    )
    lora_alpha: float = setting(16.0, "adapters are scaled by lora_alpha / lora_dim", POSITIVE)
    lora_module_name: str = setting("layers", "layers with this text in their name get adapters")
    only_optimize_lora: bool = setting(False, "freeze all parameters except the adapters")

    conversations: str = setting(
        "builtin",
        "file or folder of conversations to prepare; 'builtin': questions about Python's library",
        PATH,
        group="fine-tuning",
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("lora_alpha", "lora_module_name", "only_optimize_lora"):
            if self.lora_dim is None and getattr(self, name) != getattr(SFTArguments, name):
                raise UsageError(f"--{name} needs adapters: pass --lora_dim too, such as 8")

    def adapt(self, model: Transformer) -> None:
        """Add adapters if --lora_dim is given. Raises ConfigError if they do not fit the model."""
        if self.lora_dim is not None:
            only = self.only_optimize_lora
            add_lora(model, LoRA(self.lora_dim, self.lora_alpha, self.lora_module_name, only))


@dataclass
class DistillationArguments(TrainingArguments):
    """Flags of distillation. Raises UsageError for an invalid value."""

    program: ClassVar[str] = "train_distillation_accelerate.py"
    about: ClassVar[str] = "Train a model to predict the probabilities of a trained, larger model."
    logged: ClassVar[tuple[str, ...]] = ("hard_loss", "soft_loss", "agreement")

    data: str | None = setting(
        None, "folder of prepared data (default: the teacher's own data)", group="data and output"
    )
    teacher: str = setting(
        "auto",
        "model to learn from: a run, RUN@best (lowest validation loss), a checkpoint, a folder "
        "(Hugging Face's too) or 'auto' (newest pretraining run)",
        PATH,
        group="distillation",
    )
    teacher_config: str | None = setting(
        None, "ZeRO-3 file that divides the teacher, like configs/zero3_inference.json", PATH
    )
    alpha: float = setting(0.5, "weight of the hard loss; the soft loss has 1 - alpha", SHARE)
    temperature: float = setting(2.0, "divisor of both models' logits in the soft loss", POSITIVE)
    kl: str = setting(
        "forward", "KL(teacher, student) or KL(student, teacher)", choices=("forward", "reverse")
    )

    @property
    def dataset(self) -> type[TokenStream]:
        """The class that reads --data. Raises UsageError if --data is missing or damaged."""
        by_kind = {each.kind: each for each in (PackedDataset, ConversationSet)}
        return by_kind[read_description(self.data)["kind"]]


def flags_of(dataclass_type):
    """Yield (field, group title) of every field that is a flag."""
    group = "model"
    for item in fields(dataclass_type):
        group = item.metadata.get("group", group)
        if item.metadata.get("flag", True):
            yield item, group


def build_parser(
    arguments: type[TrainingArguments] = TrainingArguments, only: Container[str] | None = None
) -> argparse.ArgumentParser:
    """Return a parser of a program's training flags (`only` limits these to some names) and of the
    model's flags. Parsing returns only the typed flags and local_rank, without defaults."""
    prog = f"python {arguments.program}"
    parser = OneLineParser(prog=prog, description=arguments.about, allow_abbrev=False)
    groups = {}
    training_flags = [each for each in flags_of(arguments) if not only or each[0].name in only]
    for item, title in [*training_flags, *flags_of(LMConfig)]:
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
            optional = isinstance(item.type, types.UnionType)  # such as int | None
            value_type = item.type.__args__[0] if optional else item.type
            choices = item.metadata.get("choices")
            metavar = None if choices else value_type.__name__.upper()
            options |= {"type": value_type, "choices": choices, "metavar": metavar}
        if "alone" in item.metadata:  # the value of a flag that is typed without a value
            options |= {"nargs": "?", "const": item.metadata["alone"]}
        group.add_argument(f"--{item.name}", *item.metadata.get("aliases", ()), **options)
    # DeepSpeed's launcher adds this flag. It is ignored: LOCAL_RANK has the same value.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser


def show_default(value) -> str:
    """Return a default as --help shows it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def as_arguments(
    values: dict, arguments: type[TrainingArguments] = TrainingArguments
) -> tuple[TrainingArguments, dict]:
    """Split parsed flags into training arguments and model settings. This changes `values`."""
    values.pop("local_rank")
    names = [item.name for item, _ in flags_of(LMConfig)]
    model_settings = {name: values.pop(name) for name in names if name in values}
    # A typed rate is that of all layers, unless factors are typed too.
    if "learning_rate" not in values and not values.get("init_from", arguments.init_from):
        shape = [model_settings.get(x, getattr(LMConfig, x)) for x in ("dim", "tie_embeddings")]
        values = default_rates(values.get("optimizer", arguments.optimizer), *shape) | values
    return arguments(**values), model_settings


def as_words(flags: dict[str, Any]) -> list[str]:
    """Return flags as words of a command."""
    words = []
    for name, value in flags.items():
        is_switch = isinstance(value, bool)
        words.append(f"--{'' if value else 'no-'}{name}" if is_switch else f"--{name}={value}")
    return words
