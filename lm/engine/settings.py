"""What an engine asks of the training flags."""

from typing import Protocol


class Settings(Protocol):
    """Flags of training, with their names on the command line. `TrainingArguments` has them."""

    program: str
    batch_size: int
    accumulation_steps: int
    optimizer: str
    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    grad_clip: float
    dtype: str
    tf32: bool
    deepspeed: str | None
    coalesce_reduction: bool
    gradient_checkpointing: str
    threads: int | None

    @property
    def mixed_precision(self) -> str:
        """Accelerate's name for the dtype."""

    def global_batch(self, processes: int) -> int:
        """Return the number of sequences in an optimizer step, on all processes together."""
