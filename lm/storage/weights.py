"""Load a trained model and its tokenizer from a run, a checkpoint or a folder of weights."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import Tensor

from lm.common.errors import UsageError
from lm.data.chat_template import PLAIN_JINJA, TEMPLATE_FILE, JinjaTemplate
from lm.data.tokenizer import JsonTokenizer, Tokenizer, open_tokenizer, tokenizer_in
from lm.formats import portable
from lm.formats.config_json import read_config_json
from lm.formats.hugging_face import read_hugging_face
from lm.storage import checkpoint
from lm.storage.find import BEST, RUNS, find_run
from lm.storage.folder import RunFolder
from model import LMConfig, Transformer
from model.lora import merged_weights


@dataclass
class Trained:
    """A trained model with its tokenizer."""

    # The model is in evaluation mode. The caller of `load_trained` chooses device and precision.
    model: Transformer
    tokenizer: Tokenizer  # the model was trained with this tokenizer
    folder: Path  # the weights were read from this folder
    chats: bool = False  # True if trained with the template of lm/data/chat_template.py

    @property
    def name(self) -> str:
        """NAME@step-N for a checkpoint, NAME for the weights/ of a run, else the folder's name."""
        folder = self.folder.resolve()
        if folder.parent.name == "checkpoints":
            return f"{folder.parent.parent.name}@{folder.name}"
        return (folder.parent if folder.name == "weights" else folder).name


@dataclass(frozen=True)
class WeightsFolder:
    """A folder of weights, and the path of its tokenizer."""

    path: Path  # portable weights, a checkpoint, or a Hugging Face folder
    tokenizer: Path  # the file may be missing
    is_foreign: bool = False  # `path` is a Hugging Face folder

    @classmethod
    def find(
        cls, name: str, runs: Path = RUNS, program: str | None = None, foreign: bool = False
    ) -> "WeightsFolder":
        """Find the weights of a finished run, or an unfinished run's newest undamaged checkpoint.

        Args:
            name: a run, RUN@best, a checkpoint, a folder of weights, or 'auto'.
            runs, program: 'auto' is the newest run of this program (None: of any) in this folder.
            foreign: accept a Hugging Face folder.
        Raises UsageError if there are no weights, if the named checkpoint or all checkpoints are
        damaged, or if `name` is a Hugging Face folder and `foreign` is False."""
        at_best = name.endswith(BEST) and not Path(name).exists()
        path = find_run(name.removesuffix(BEST) if at_best else name, runs, program)
        if at_best:
            path = checkpoint.best(RunFolder(path).all_checkpoints())
            if path is None:
                raise UsageError(f"{name}: no checkpoint of this run has a validation loss")
        if (path / "weights").is_dir():
            path = path / "weights"
        files = portable.CONFIG_FILE, portable.WEIGHTS_FILE
        if any((path / name).exists() for name in files):
            is_foreign = portable.has_setting("model_type", path)
            if is_foreign and not foreign:
                raise UsageError(f"import {path}: python -m scripts.import_weights {path} OUT")
            return cls(path, tokenizer_in(path), is_foreign)
        found = checkpoint.newest_undamaged(checkpoint.checkpoints_at(path))
        if not found:
            raise UsageError(f"{path} contains neither {portable.WEIGHTS_FILE} nor checkpoints")
        return cls(found[0], checkpoint.run_of(found[0]).tokenizer)

    @property
    def is_checkpoint(self) -> bool:
        return (self.path / checkpoint.STATE).exists()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the weights, with adapters merged. Raises UsageError if they are damaged or do
        not fit the model."""
        if self.is_foreign:
            weights = read_hugging_face(self.path)
        elif self.is_checkpoint:
            weights = checkpoint.saved_weights(self.path)
            weights = merged_weights(weights, checkpoint.saved_lora(self.path))
        else:
            weights = portable.load_tensors(self.path / portable.WEIGHTS_FILE)
        portable.require_fit(portable.without_memory(self.config()), weights, str(self.path))
        return weights

    def config(self) -> LMConfig:
        """Return the shape of the model. Raises UsageError if its file is damaged or invalid."""
        if self.is_foreign:
            return read_config_json(self.path)
        if self.is_checkpoint:
            state = checkpoint.read_state(self.path)
            return portable.build_config(state["model"], self.path / checkpoint.STATE)
        return portable.load_config(self.path)

    def sha256(self) -> str:
        """Return a hash of the shape and the weights (fp32, adapters merged), not of the files.
        A process hashes the same files once."""
        found = [(path.name, path.stat()) for path in sorted(self.path.iterdir())]
        return _sha256(self, tuple((x, s.st_ino, s.st_size, s.st_mtime_ns) for x, s in found))

    def load(self) -> Transformer:
        """Return the model in evaluation mode, on the CPU and in fp32."""
        return portable.from_weights(self.config(), self.tensors(), str(self.path))


@cache
def _sha256(folder: WeightsFolder, files: tuple) -> str:
    """Return the hash of a folder's weights. `files` (names, inodes, sizes, times) changes when a
    file does, so that the cache misses."""
    weights = folder.tensors()
    digest = hashlib.sha256(json.dumps(folder.config().shape(), sort_keys=True).encode())
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].float().flatten().numpy())
    return digest.hexdigest()


def load_trained(name: str, load: Callable = WeightsFolder.load) -> Trained:
    """Load the model `name` (see `WeightsFolder.find`) and its tokenizer. `load` builds the model.
    Raises UsageError if files are missing, damaged, or do not match."""
    folder = WeightsFolder.find(name)
    tokenizer, file = open_tokenizer(folder.tokenizer), folder.tokenizer.parent / TEMPLATE_FILE
    tokenizer.more_end_ids = sorted(portable.end_ids(file.parent) - {tokenizer.eos_id})
    chats = file.exists()
    template = file.read_text(encoding="utf-8") if chats else ""
    if template.strip() not in ("", PLAIN_JINJA) and isinstance(tokenizer, JsonTokenizer):
        chats, tokenizer.chat_template = False, JinjaTemplate(template, tokenizer.path)
    trained = Trained(load(folder), tokenizer, folder.path, chats)
    pieces, size = trained.tokenizer.vocab_size, trained.model.config.vocab_size
    if pieces > size:
        raise UsageError(f"{folder.tokenizer} has {pieces} pieces, the model has only {size}")
    return trained
