"""The flags of train_sft_accelerate.py."""

import shlex
from dataclasses import dataclass
from typing import ClassVar

from common.errors import UsageError
from data.conversation_set import ConversationSet
from model.config import setting
from training.arguments import FILE_NAME, changed
from training.lora_arguments import LoRAArguments

# Flags of scripts.prepare_data that cannot be chosen here, and why.
GIVEN = {
    "--data": "--conversations names what is prepared",
    "--conversations": "it is a flag of its own",
    "--tokenizer": "it is that of the weights in --init_from",
    "--out": "the folder is named after the conversations; scripts.prepare_data takes any",
}


@dataclass
class SFTArguments(LoRAArguments):
    """The flags of pretraining, those of adapters, and these. Raises UsageError: as there."""

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

    def says_how_to_prepare(self) -> bool:
        """Whether conversations or flags for them were given."""
        return (self.conversations, self.prepare_flags) != ("builtin", "")

    def prepare_words(self) -> list[str]:
        """--prepare_flags, as a shell would take them apart. Raises UsageError: it could not, or
        one of them is given by this program."""
        try:
            words = shlex.split(self.prepare_flags)
        except ValueError as error:
            raise UsageError(f"--prepare_flags {self.prepare_flags!r}: {error}") from error
        for word in words:
            if (name := word.partition("=")[0]) in GIVEN:
                raise UsageError(f"--prepare_flags {name}: leave it out, {GIVEN[name]}")
        return words
