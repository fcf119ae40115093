"""The weights that a new run begins with: drawn at random, or those of --init_from."""

from dataclasses import dataclass

from torch import Tensor

from common.errors import UsageError
from data.dataset import TokenStream
from data.errors import DataError
from data.tokenizer import tokenizer_hash
from model import LMConfig
from model.config import HOW_IT_COMPUTES
from runs.find import PRETRAINING
from runs.weights import WeightsFolder

# Settings in which a run may differ from its weights. Rotary positions have no weights.
MAY_DIFFER = (*HOW_IT_COMPUTES, "max_seq_len")


def require_same_tokenizer(source: WeightsFolder, data: TokenStream) -> None:
    """Raise DataError where a trained model cannot read this data. Without a tokenizer beside the
    model only the sizes of the vocabularies are compared."""
    room = source.config().vocab_size
    same, flag = data.vocab_size == room, "the model's tokenizer"
    if source.tokenizer.is_file():
        same = tokenizer_hash(source.tokenizer) == data.description["tokenizer_sha256"]
        flag = f"--tokenizer {source.tokenizer}"
    if not same or data.vocab_size > room:
        raise DataError(
            f"{data.folder}, vocabulary {data.vocab_size}, has another tokenizer than the model in "
            f"{source.path}, vocabulary {room}: prepare the {data.kind} anew with "
            f"{flag}"
        )


@dataclass
class InitialWeights:
    """Where the weights are, and the settings of the model that they decide."""

    settings: dict  # of the model; without a source the vocabulary is missing
    source: WeightsFolder | None = None  # None: drawn at random

    @classmethod
    def find(cls, init_from: str | None, given: dict) -> "InitialWeights":
        """Find the weights and read the shape of their model.

        Args:
            given: settings of the model that were typed.

        Raises UsageError: no weights there, or a flag contradicts their shape. ConfigError: a
        shape that cannot be read or cannot work.
        """
        if init_from is None:
            return cls(given)
        source = WeightsFolder.find(init_from, PRETRAINING)
        theirs = source.config().shape()
        for name, value in given.items():
            if name not in MAY_DIFFER and value != theirs[name]:
                raise UsageError(
                    f"--{name} {value} (there {theirs[name]}): leave it out, --init_from takes the "
                    f"shape from {source.path}"
                )
        settings = theirs | given
        LMConfig(**settings)
        return cls(settings, source)

    @property
    def max_seq_len(self) -> int:
        return self.settings.get("max_seq_len", LMConfig.max_seq_len)

    def config(self, train_set: TokenStream) -> LMConfig:
        """Return the shape of the model for this data. Raises DataError: the data has another
        tokenizer than the weights."""
        if self.source is None:
            return LMConfig(**self.settings, vocab_size=train_set.vocab_size)
        require_same_tokenizer(self.source, train_set)
        return LMConfig(**self.settings)

    def load(self) -> dict[str, Tensor]:
        """Return name → fp32 weights on the CPU; a source must be there. Raises ConfigError: files
        that are damaged or do not fit each other."""
        model = self.source.load()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    def describe(self) -> str:
        """Describe the weights for the start block."""
        if self.source is None:
            return "scratch"
        words = f"{self.source.path}, with a new optimizer"
        if self.max_seq_len != (theirs := self.source.config().max_seq_len):
            words += f"; max_seq_len is {self.max_seq_len} now and {theirs} there"
        if not self.source.tokenizer.is_file():
            words += "; no tokenizer there: only the size of the vocabulary was compared"
        return words
