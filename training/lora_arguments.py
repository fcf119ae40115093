"""The flags of LoRA, by DeepSpeed-Chat's names, for a training program that has adapters."""

from dataclasses import dataclass, fields

from common.errors import UsageError
from model import Transformer
from model.config import setting
from model.lora import add_lora
from training.arguments import AT_LEAST_1, POSITIVE, TrainingArguments


@dataclass
class LoRAArguments(TrainingArguments):
    """Raises UsageError: as `TrainingArguments`, and a flag of adapters where there are none."""

    lora_dim: int | None = setting(
        None,
        "train adapters (LoRA) of this inner dimension, and freeze the matrices that have one",
        AT_LEAST_1,
        group="adapters",
    )
    lora_alpha: float = setting(16.0, "adapters are scaled by lora_alpha / lora_dim", POSITIVE)
    lora_module_name: str = setting("layers", "part of the names of the layers that have one")
    only_optimize_lora: bool = setting(False, "freeze embedding, norms and output too")

    def __post_init__(self):
        super().__post_init__()
        if self.lora_dim is not None:
            return
        for item in fields(LoRAArguments):
            of_lora = item.name in ("lora_alpha", "lora_module_name", "only_optimize_lora")
            if of_lora and getattr(self, item.name) != item.default:
                raise UsageError(f"--{item.name} is about adapters: pass --lora_dim too, such as 8")

    def adapt(self, model: Transformer) -> None:
        """Raises ConfigError: see `add_lora`."""
        if self.lora_dim is not None:
            add_lora(
                model,
                dim=self.lora_dim,
                alpha=self.lora_alpha,
                module_name=self.lora_module_name,
                only_lora=self.only_optimize_lora,
            )
