"""A trained model and its tokenizer, from whatever a run has left."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from common.errors import UsageError
from data.chat_template import TEMPLATE_FILE
from data.errors import DataError
from data.tokenizer import Tokenizer, open_tokenizer, tokenizer_in
from formats.hugging_face import read_llama_config, read_llama_weights
from formats.portable import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    build_config,
    build_model,
    load_config,
    load_tensors,
    read_json,
    require_fit,
    without_memory,
)
from model import LMConfig, Transformer
from model.lora import merged_weights
from storage.checkpoint import (
    STATE,
    best,
    damage,
    newest_sound,
    read_state,
    run_of,
    saved_lora,
    saved_weights,
)
from storage.find import BEST, find_run
from storage.folder import RunFolder


@dataclass
class Trained:
    model: Transformer  # in evaluation mode, on the CPU, in fp32, unless loaded in another way
    tokenizer: Tokenizer
    folder: Path  # where the weights come from
    chats: bool = False  # it has learned to answer, in the template of data/chat_template

    @property
    def n_parameters(self) -> int:
        """Number of parameters by the model's shape: a process may hold a share only."""
        return without_memory(self.model.config).num_parameters()

    @property
    def name(self) -> str:
        """NAME of out/runs/NAME/weights, NAME@step-N of a checkpoint, else the folder's name."""
        folder = self.folder.resolve()
        if folder.parent.name == "checkpoints":
            return f"{folder.parent.parent.name}@{folder.name}"
        return (folder.parent if folder.name == "weights" else folder).name


@dataclass
class WeightsFolder:
    """Weights, and the tokenizer that belongs to them."""

    path: Path  # portable weights, a checkpoint, or a Hugging Face folder
    tokenizer: Path  # it may be missing
    is_foreign: bool = False  # a Hugging Face folder with a Llama

    @classmethod
    def find(cls, name: str, program: str | None = None, foreign: bool = False) -> "WeightsFolder":
        """Find a finished run's weights, else its newest sound checkpoint, or RUN@best's. Raises
        UsageError: nothing sound there, or a Hugging Face folder without `foreign`."""
        at_best = name.endswith(BEST) and not Path(name).exists()
        path = find_run(name.removesuffix(BEST) if at_best else name, program=program)
        if at_best and not (path := best(RunFolder(path).all_checkpoints())):
            raise UsageError(f"{name}: none of its checkpoints was saved at a validation")
        if (path / "weights").is_dir():
            path = path / "weights"
        config = path / CONFIG_FILE
        if config.exists() or (path / WEIGHTS_FILE).exists():
            is_foreign = config.exists() and "model_type" in read_json(config)
            if is_foreign and not foreign:
                raise UsageError(f"{path}: python -m scripts.import_weights {path} OUT reads it")
            return cls(path, tokenizer_in(path), is_foreign)
        path = find_checkpoint(path)
        run = run_of(path)
        return cls(path, run.tokenizer if run.tokenizer.exists() else tokenizer_in(run.weights))

    @property
    def is_checkpoint(self) -> bool:
        return (self.path / STATE).exists()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the weights, with adapters added. Raises ConfigError: damaged, or no Llama."""
        if self.is_foreign:
            return read_llama_weights(self.path)
        if self.is_checkpoint:
            return merged_weights(saved_weights(self.path), saved_lora(self.path))
        return load_tensors(self.path / WEIGHTS_FILE)

    def config(self) -> LMConfig:
        """Return the shape of the model. Raises ConfigError: it cannot be read or built."""
        if self.is_foreign:
            return read_llama_config(self.path)
        if self.is_checkpoint:
            return build_config(read_state(self.path)["model"], self.path / STATE)
        return load_config(self.path)

    def sound_tensors(self) -> Mapping[str, Tensor]:
        """Return `tensors` after a look at all of them. Raises ConfigError: they do not fit."""
        weights = self.tensors()
        require_fit(without_memory(self.config()), weights, str(self.path))
        return weights

    def sha256(self) -> str:
        """Hash shape and weights, whatever file they are in."""
        weights = self.sound_tensors()
        digest = hashlib.sha256(json.dumps(self.config().shape(), sort_keys=True).encode())
        for name in sorted(weights):
            digest.update(name.encode())
            digest.update(weights[name].float().flatten().numpy())
        return digest.hexdigest()

    def load(self) -> Transformer:
        """Return the model, see `build_model`."""
        return build_model(self.config(), self.tensors(), str(self.path))


def load_trained(
    name: str, load: Callable[[WeightsFolder], Transformer] = WeightsFolder.load
) -> Trained:
    """Load model and tokenizer from whatever `WeightsFolder.find` takes. Raises UsageError,
    ConfigError: nothing there, damaged, or they do not belong together."""
    folder = WeightsFolder.find(name)
    chats = (folder.tokenizer.parent / TEMPLATE_FILE).exists()
    trained = Trained(load(folder), open_tokenizer(folder.tokenizer), folder.path, chats)
    pieces, room = trained.tokenizer.vocab_size, trained.model.config.vocab_size
    if pieces > room:
        raise DataError(f"{folder.tokenizer} has {pieces} pieces, the model {folder.path} {room}")
    return trained


def find_checkpoint(path: Path) -> Path:
    """Return a checkpoint, or the newest sound one of a run. Raises UsageError: none."""
    if (path / STATE).exists():
        if problem := damage(path):
            raise UsageError(f"checkpoint {path} is damaged: {problem}")
        return path
    checkpoint, problems = newest_sound(RunFolder(path))
    if not checkpoint:
        damaged = f"every checkpoint of {path} is damaged: {', '.join(problems.values())}"
        nothing = f"{path} has neither {WEIGHTS_FILE} nor checkpoints: give a run folder"
        raise UsageError(damaged if problems else nothing)
    return checkpoint
