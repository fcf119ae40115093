"""A trained model and its tokenizer, from whatever a run has left."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from common.errors import UsageError
from data.chat_template import TEMPLATE_FILE
from data.errors import DataError
from data.tokenizer import Tokenizer, open_tokenizer, tokenizer_in
from formats.portable import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    TensorFile,
    load_config,
    read_json,
    require_fit,
)
from formats.state_dicts import LlamaTensors, read_llama_config
from model import ConfigError, LMConfig, Transformer
from model.lora import merged_weights
from runs.checkpoint import (
    STATE,
    best,
    damage,
    newest_sound,
    run_of,
    saved_config,
    saved_lora,
    saved_weights,
)
from runs.find import BEST, WHAT, find_run
from runs.folder import RunFolder


@dataclass
class Trained:
    model: Transformer  # in evaluation mode, on the CPU, in fp32, unless loaded in another way
    tokenizer: Tokenizer
    folder: Path  # that the weights come from
    chats: bool = False  # whether it has learned to answer, in the template of data/chat_template

    @property
    def n_parameters(self) -> int:
        """By the model's shape: a process may have a share of it only."""
        with torch.device("meta"):
            return Transformer(self.model.config).num_parameters()

    @property
    def name(self) -> str:
        """NAME of out/runs/NAME/weights, NAME@step-N of a checkpoint, or that of the folder."""
        folder = self.folder.resolve()
        if folder.name == "weights":
            return folder.parent.name
        if folder.parent.name == "checkpoints":
            return f"{folder.parent.parent.name}@{folder.name}"
        return folder.name


@dataclass
class WeightsFolder:
    """Where weights are."""

    path: Path  # portable weights, or a checkpoint
    tokenizer: Path  # where theirs belongs; it may be missing
    is_foreign: bool = False  # a Hugging Face folder, with a Llama in safetensors

    @classmethod
    def find(cls, name: str, program: str | None = None, foreign: bool = False) -> "WeightsFolder":
        """Of a finished run its weights, of a run under way its newest sound checkpoint; of
        RUN@best the checkpoint of its lowest validation; `program` as in `find_run`. Raises
        UsageError: nothing there, or nothing sound; or a Hugging Face folder, but for `foreign`."""
        if name.endswith(BEST) and not Path(name).exists():
            path = find_best(find_run(name.removesuffix(BEST), program=program))
        else:
            path = find_run(name, program=program)
        if (path / "weights").is_dir():
            path = path / "weights"
        if (path / CONFIG_FILE).exists() or (path / WEIGHTS_FILE).exists():
            is_foreign = is_hugging_face(path)
            if is_foreign and not foreign:
                raise UsageError(
                    f"{path} is a Hugging Face folder: python -m scripts.import_weights {path} OUT "
                    "turns it into this project's form"
                )
            return cls(path, tokenizer_in(path), is_foreign)
        path = find_checkpoint(path)
        run = run_of(path)
        return cls(path, run.tokenizer if run.tokenizer.exists() else tokenizer_in(run.weights))

    @property
    def is_checkpoint(self) -> bool:
        return (self.path / STATE).exists()

    def tensors(self) -> Mapping[str, Tensor]:
        """name → weights, read when they are asked for; adapters are added to theirs. Raises
        OSError, SafetensorError: a file that cannot be read. ConfigError: no Llama."""
        if self.is_foreign:
            return LlamaTensors(self.path)
        if not self.is_checkpoint:
            return TensorFile(self.path / WEIGHTS_FILE)
        return merged_weights(saved_weights(self.path), saved_lora(self.path))

    def config(self) -> LMConfig:
        """The shape of the model. Raises ConfigError: it cannot be read, or cannot be built."""
        if self.is_foreign:
            return read_llama_config(self.path)
        return saved_config(self.path) if self.is_checkpoint else load_config(self.path)

    def sound_tensors(self) -> Mapping[str, Tensor]:
        """`tensors`, all of which have been looked at. Raises ConfigError: they cannot be read, are
        not those of `config`, or are no numbers."""
        try:
            weights = self.tensors()
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self.path}: no readable weights ({error})") from error
        with torch.device("meta"):
            shapes = Transformer(self.config())
        require_fit(shapes, weights, str(self.path))
        return weights

    def sha256(self) -> str:
        """Of shape and weights, whatever file they are in: a run's last checkpoint has that of its
        weights. Raises ConfigError: see `sound_tensors`."""
        weights = self.sound_tensors()
        digest = hashlib.sha256(json.dumps(self.config().shape(), sort_keys=True).encode())
        for name in sorted(weights):
            digest.update(name.encode())
            digest.update(weights[name].float().flatten().numpy())
        return digest.hexdigest()

    def load(self) -> Transformer:
        """The model, in evaluation mode, on the CPU, in fp32. Raises ConfigError: files that are
        damaged or do not fit each other."""
        weights, model = self.sound_tensors(), Transformer(self.config())
        for name, parameter in model.named_parameters():
            parameter.data.copy_(weights[name])
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
    chats = (folder.tokenizer.parent / TEMPLATE_FILE).exists()
    trained = Trained(load(folder), open_tokenizer(folder.tokenizer), folder.path, chats)
    pieces = trained.tokenizer.vocab_size
    room = trained.model.config.vocab_size
    if pieces > room:
        raise DataError(
            f"{folder.tokenizer} has {pieces} pieces, the model in {folder.path} only {room}: "
            "they do not belong together"
        )
    return trained


def is_hugging_face(folder: Path) -> bool:
    """Whether it is such a folder, which has other names and another rotation."""
    try:
        return "model_type" in read_json(folder / CONFIG_FILE)
    except ConfigError:
        return False  # `config` says what is wrong


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
