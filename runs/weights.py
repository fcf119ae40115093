"""A trained model and its tokenizer, from whatever a run has left."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from common.errors import UsageError
from data.errors import DataError
from data.tokenizer import Tokenizer, open_tokenizer, tokenizer_in
from formats.portable import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    load_config,
    load_portable,
    load_weights,
    read_json,
)
from model import ConfigError, LMConfig, Transformer
from runs.checkpoint import STATE, WEIGHTS, best, damage, newest_sound, saved_config
from runs.find import BEST, WHAT, find_run
from runs.folder import RunFolder


@dataclass
class Trained:
    model: Transformer  # in evaluation mode, on the CPU, in fp32, unless loaded in another way
    tokenizer: Tokenizer
    folder: Path  # that the weights come from

    @property
    def n_parameters(self) -> int:
        """By the model's shape: a process may have a share of it only."""
        with torch.device("meta"):
            return Transformer(self.model.config).num_parameters()


@dataclass
class WeightsFolder:
    """Where weights are."""

    path: Path  # portable weights, or a checkpoint
    tokenizer: Path  # where theirs belongs; it may be missing

    @classmethod
    def find(cls, name: str) -> "WeightsFolder":
        """Of a finished run its weights, of a run under way its newest sound checkpoint; of
        RUN@best the checkpoint of its lowest validation. Raises UsageError: nothing there, or
        nothing sound."""
        if name.endswith(BEST) and not Path(name).exists():
            path = find_best(find_run(name.removesuffix(BEST)))
        else:
            path = find_run(name)
        if (path / "weights").is_dir():
            path = path / "weights"
        if (path / CONFIG_FILE).exists() or (path / WEIGHTS_FILE).exists():
            refuse_foreign(path)
            return cls(path, tokenizer_in(path))
        path = find_checkpoint(path)
        run = RunFolder(path.resolve().parent.parent)
        return cls(path, run.tokenizer if run.tokenizer.exists() else tokenizer_in(run.weights))

    @property
    def is_checkpoint(self) -> bool:
        return (self.path / STATE).exists()

    @property
    def file(self) -> Path:
        """The weights themselves, in safetensors."""
        return self.path / (WEIGHTS if self.is_checkpoint else WEIGHTS_FILE)

    def config(self) -> LMConfig:
        """The shape of the model. Raises ConfigError: it cannot be read, or cannot be built."""
        return saved_config(self.path) if self.is_checkpoint else load_config(self.path)

    def load(self) -> Transformer:
        """The model, in evaluation mode, on the CPU, in fp32. Raises ConfigError: files that are
        damaged or do not fit each other."""
        if not self.is_checkpoint:
            return load_portable(self.path)
        model = Transformer(self.config())
        load_weights(model, load_file(self.file), str(self.path))
        return model.eval()


def load_trained(
    name: str, load: Callable[[WeightsFolder], Transformer] = WeightsFolder.load
) -> Trained:
    """Model and tokenizer of a finished run, a run under way (its newest sound checkpoint), a run
    at its lowest validation (RUN@best), a checkpoint, or portable weights alone.

    Args:
        load: another way to make the model of what was found.

    Raises UsageError, ConfigError, DataError: nothing there, damaged, or model and tokenizer do not
    belong together.
    """
    folder = WeightsFolder.find(name)
    trained = Trained(load(folder), open_tokenizer(folder.tokenizer), folder.path)
    pieces = trained.tokenizer.vocab_size
    room = trained.model.config.vocab_size
    if pieces > room:
        raise DataError(
            f"{folder.tokenizer} has {pieces} pieces, the model in {folder.path} only {room}: "
            "they do not belong together"
        )
    return trained


def refuse_foreign(folder: Path) -> None:
    """Raises UsageError: a Hugging Face folder, which has other names and another rotation."""
    try:
        config = read_json(folder / CONFIG_FILE)
    except ConfigError:
        return  # load_portable says what is wrong
    if "model_type" in config:
        raise UsageError(
            f"{folder} is a Hugging Face folder: python -m scripts.import_weights {folder} OUT "
            "turns it into this project's form"
        )


def find_best(run: Path) -> Path:
    """The checkpoint of a run's lowest validation. Raises UsageError: it has none."""
    if checkpoint := best(RunFolder(run).all_checkpoints()):
        return checkpoint
    raise UsageError(f"{run}{BEST}: none of its checkpoints was saved at a validation")


def find_checkpoint(path: Path) -> Path:
    """The checkpoint itself, or the newest sound one of a run folder. Raises UsageError: neither,
    or nothing sound."""
    if (path / STATE).exists():
        if problem := damage(path):
            raise UsageError(f"checkpoint {path} is damaged: {problem}")
        return path
    checkpoint, problems = newest_sound(RunFolder(path))
    if checkpoint:
        return checkpoint
    if not problems:
        raise UsageError(f"{path} has neither {WEIGHTS_FILE} nor checkpoints: give {WHAT}")
    last = max(problems)
    raise UsageError(f"every checkpoint of {path} is damaged; {last}: {problems[last]}")
