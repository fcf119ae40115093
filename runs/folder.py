"""The folder that holds all of a run: the names of everything in it."""

import json
from pathlib import Path

from data.chat_template import TEMPLATE_FILE
from data.tokenizer import tokenizer_in


class RunFolder:
    """The paths in a run folder; nothing has to be there yet."""

    def __init__(self, path: Path):
        self.path = path
        self.settings = path / "settings.json"
        self.template = path / TEMPLATE_FILE  # only of a run that learns to answer
        self.metrics = path / "metrics.jsonl"
        self.lock = path / "lock"
        self.checkpoints = path / "checkpoints"
        self.latest = self.checkpoints / "latest"  # holds the name of the newest checkpoint
        self.profile = path / "profile"
        self.weights = path / "weights"
        self.base = path / "base"  # the frozen weights of a run with adapters
        self.adapter = path / "adapter"  # the adapters alone, in PEFT's form
        self.loss_picture = path / "loss.png"
        self.report = path / "report.html"
        self.sample = path / "sample.txt"
        self.samples = path / "samples.jsonl"  # written during training
        self.bad_samples = path / "bad_samples.json"  # the batch at which the run gave up

    @property
    def tokenizer(self) -> Path:
        return tokenizer_in(self.path)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def all_checkpoints(self) -> list[Path]:
        """List the checkpoints with their final names, oldest first."""
        return sorted(p for p in self.checkpoints.glob("step-*") if p.name[5:].isdigit())


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint was saved after, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def read_settings(path: Path) -> dict:
    """Read settings.json; {} if it is missing or damaged, for a run does not need it."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}
