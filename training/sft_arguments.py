"""The flags of train_sft_accelerate.py; those of adapters have DeepSpeed-Chat's names."""

from dataclasses import dataclass
from typing import ClassVar

from common.errors import UsageError
from data.conversation_set import ConversationSet
from model import Transformer
from model.config import setting
from model.lora import add_lora
from training.arguments import AT_LEAST_1, FILE_NAME, POSITIVE, TrainingArguments, changed


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

    def says_how_to_prepare(self) -> bool:
        """Return whether conversations or flags for them were given."""
        return (self.conversations, self.prepare_flags) != ("builtin", "")
