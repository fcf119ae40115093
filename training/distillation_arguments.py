"""The flags of train_distillation_accelerate.py."""

from dataclasses import dataclass
from typing import ClassVar

from data.conversation_set import ConversationSet
from data.dataset import PackedDataset, TokenStream
from data.shards import read_description
from model.config import setting
from runs.find import DISTILLATION
from training.arguments import FILE_NAME, POSITIVE, SHARE, TrainingArguments
from training.distillation_loss import KL


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
