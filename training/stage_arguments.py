"""The flags that fine-tuning and distillation add to those of pretraining.

Flags of adapters have DeepSpeed-Chat's names.
"""

from dataclasses import dataclass
from typing import ClassVar

from common.errors import UsageError
from data.dataset import ConversationSet, PackedDataset, TokenStream
from data.shards import read_description
from model import Transformer
from model.config import setting
from model.lora import add_lora
from runs.find import DISTILLATION
from training.arguments import AT_LEAST_1, FILE_NAME, POSITIVE, SHARE, TrainingArguments, changed
from training.distillation_loss import KL


@dataclass
class SFTArguments(TrainingArguments):
    """The flags of pretraining, those of adapters (LoRA), and those of fine-tuning.

    Raises UsageError: as TrainingArguments, and for a flag of adapters without --lora_dim.
    """

    program: ClassVar[str] = "train_sft_accelerate.py"
    about: ClassVar[str] = "Fine-tune a model on conversations, so that it answers."
    dataset: ClassVar[type] = ConversationSet

    data: str | None = setting(
        None,
        "folder made by scripts.prepare_data --conversations (default: made of --conversations)",
        group="data and output",
    )
    init_from: str = changed("init_from", "auto")
    epochs: int = changed("epochs", 3)
    learning_rate: float = changed("learning_rate", 1e-4)

    lora_dim: int | None = setting(
        None,
        "train adapters (LoRA) of this inner dimension, and freeze the matrices that have one",
        AT_LEAST_1,
        group="adapters",
    )
    lora_alpha: float = setting(16.0, "adapters are scaled by lora_alpha / lora_dim", POSITIVE)
    lora_module_name: str = setting("layers", "part of the names of the layers that have one")
    only_optimize_lora: bool = setting(False, "freeze embedding, norms and output too")

    conversations: str = setting(
        "builtin",
        "file or folder of conversations, prepared at start with the tokenizer of the weights; "
        "'builtin': questions about Python's standard library",
        FILE_NAME,
        group="fine-tuning",
    )
    prepare_flags: str = setting(
        "",
        "flags of scripts.prepare_data for these conversations, behind a '=': "
        "--prepare_flags='--skip_bad_lines'",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.lora_dim is not None:
            return
        for name in ("lora_alpha", "lora_module_name", "only_optimize_lora"):
            if getattr(self, name) != getattr(SFTArguments, name):
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
    """The flags of pretraining, and these. Raises UsageError: as there."""

    program: ClassVar[str] = DISTILLATION
    about: ClassVar[str] = "Train a model to expect what a trained, larger one expects."
    logged: ClassVar[tuple[str, ...]] = ("hard_loss", "soft_loss", "agreement")

    data: str | None = setting(
        None,
        "folder made by scripts.prepare_data, of text or of conversations, with the teacher's "
        "tokenizer (default: what the teacher was trained on)",
        group="data and output",
    )
    teacher: str = setting(
        "auto",
        "run, checkpoint or folder of weights, ours or Hugging Face's, to learn from, or 'auto' "
        "for the newest run of pretraining (RUN@best: at its lowest validation)",
        FILE_NAME,
        group="distillation",
    )
    teacher_config: str | None = setting(
        None,
        "DeepSpeed file for the teacher, ZeRO-3 as in configs/zero3_inference.json (default: every "
        "process has all of it)",
        FILE_NAME,
    )
    alpha: float = setting(0.5, "share of the hard loss, that of the data's own tokens", SHARE)
    temperature: float = setting(
        2.0, "both models' logits are divided by it in the soft loss", POSITIVE
    )
    kl: str = setting(
        "forward",
        "divergence of the soft loss: forward, for which the student covers all that the teacher "
        "expects, or reverse, for which it says only what the teacher would",
        choices=KL,
    )

    @property
    def dataset(self) -> type[TokenStream]:
        """For the kind of data that --data holds. Raises DataError: it holds none."""
        kinds = {each.kind: each for each in (PackedDataset, ConversationSet)}
        return kinds[read_description(self.data)["kind"]]
