"""A trained model and its tokenizer, from whatever a run has left."""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from data.errors import DataError
from data.tokenizer import TOKENIZER_FILE, Tokenizer
from model import ConfigError, LMConfig, Transformer
from model.portable import CONFIG_FILE, WEIGHTS_FILE, load_config, load_portable, load_weights
from training.checkpoint import STATE, WEIGHTS, damage, read_state
from training.errors import UsageError
from training.run_folder import RunFolder

RUNS = Path("out/runs")
WHAT = "a run folder, a checkpoint or a folder of weights; 'auto' is the newest run in out/runs"


@dataclass
class Trained:
    model: Transformer  # in evaluation mode, on the CPU, in fp32
    tokenizer: Tokenizer
    source: Path  # the folder that the weights come from


def find_run(name: str, runs: Path = RUNS) -> Path:
    """The path that was named; for 'auto' the run that was written to last.

    Raises:
        UsageError: there is no such folder; with a guess at which one was meant.
    """
    if name == "auto":
        found = [path.parent for path in runs.glob("*/metrics.jsonl")]
        if not found:
            raise UsageError(f"there is no run in {runs} yet: bash run_accelerate.sh makes one")
        return max(found, key=lambda path: (path / "metrics.jsonl").stat().st_mtime)
    path = Path(name)
    if not path.exists():
        names = {"auto": "auto"} | {run.name: str(run) for run in runs.glob("*") if run.is_dir()}
        close = difflib.get_close_matches(path.name, names, n=1)
        guess = f": did you mean '{names[close[0]]}'?" if close else ""
        raise UsageError(f"{name}: no such folder{guess}")
    if not path.is_dir():
        raise UsageError(f"{name} is a file: give {WHAT}")
    return path


@dataclass
class Source:
    """Where weights are."""

    folder: Path  # of portable weights, or a checkpoint
    tokenizer: Path  # where theirs belongs; it may be missing

    @classmethod
    def find(cls, name: str) -> "Source":
        """Of a finished run its weights, of a run under way its newest sound checkpoint.

        Raises:
            UsageError: nothing there, or nothing sound.
        """
        path = find_run(name)
        if (path / "weights").is_dir():
            path = path / "weights"
        if (path / CONFIG_FILE).exists() or (path / WEIGHTS_FILE).exists():
            refuse_foreign(path)
            return cls(path, path / TOKENIZER_FILE)
        path = find_checkpoint(path)
        run = RunFolder(path.resolve().parent.parent)
        return cls(path, run.tokenizer if run.tokenizer.exists() else run.weights / TOKENIZER_FILE)

    def config(self) -> LMConfig:
        """The shape of the model.

        Raises:
            ConfigError: it cannot be read, or cannot be built.
        """
        if (self.folder / STATE).exists():
            return checkpoint_config(self.folder)
        return load_config(self.folder)

    def load(self) -> Transformer:
        """The model, in evaluation mode, on the CPU, in fp32.

        Raises:
            ConfigError: files that are damaged or do not fit each other.
        """
        if (self.folder / STATE).exists():
            return load_checkpointed(self.folder)
        return load_portable(self.folder)


def load_trained(name: str) -> Trained:
    """Model and tokenizer of a finished run, a run under way (its newest sound checkpoint), a
    checkpoint, or portable weights alone.

    Raises:
        UsageError, ConfigError, DataError: nothing there, damaged, or model and tokenizer do not
            belong together.
    """
    source = Source.find(name)
    trained = Trained(source.load(), Tokenizer(source.tokenizer), source.folder)
    pieces, room = trained.tokenizer.vocab_size, trained.model.config.vocab_size
    if pieces > room:
        raise DataError(
            f"{source.tokenizer} has {pieces} pieces, the model in {source.folder} only {room}: "
            "they do not belong together"
        )
    return trained


def refuse_foreign(folder: Path) -> None:
    """Raises UsageError: a Hugging Face folder, which has other names and another rotation."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # load_portable says what is wrong
    if isinstance(config, dict) and "model_type" in config:
        raise UsageError(
            f"{folder} is a Hugging Face folder: python -m scripts.import_weights {folder} OUT "
            "turns it into this project's form"
        )


def find_checkpoint(path: Path) -> Path:
    """The checkpoint itself, or the newest sound one of a run folder.

    Raises:
        UsageError: neither, or nothing sound.
    """
    if (path / STATE).exists():
        if problem := damage(path):
            raise UsageError(f"checkpoint {path} is damaged: {problem}")
        return path
    checkpoints = RunFolder(path).all_checkpoints()
    if not checkpoints:
        raise UsageError(f"{path} has neither {WEIGHTS_FILE} nor checkpoints: give {WHAT}")
    problems = {}
    for checkpoint in reversed(checkpoints):
        problems[checkpoint] = damage(checkpoint)
        if problems[checkpoint] is None:
            return checkpoint
    last = checkpoints[-1]
    raise UsageError(f"every checkpoint of {path} is damaged; {last}: {problems[last]}")


def checkpoint_config(checkpoint: Path) -> LMConfig:
    """The shape that a sound checkpoint's state.json gives.

    Raises:
        ConfigError: no shape that can be built.
    """
    identity = read_state(checkpoint)["identity"]
    shape = {name: identity[name] for name in LMConfig.__dataclass_fields__ if name in identity}
    try:
        return LMConfig.from_dict(shape)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint / STATE}: {error}") from error


def load_checkpointed(checkpoint: Path) -> Transformer:
    """The model of a sound checkpoint.

    Raises:
        ConfigError: weights that do not fit its shape.
    """
    model = Transformer(checkpoint_config(checkpoint))
    load_weights(model, load_file(checkpoint / WEIGHTS), str(checkpoint))
    return model.eval()
