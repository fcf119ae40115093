"""The folder that holds all of a run: the names of everything in it."""

from pathlib import Path

from data.tokenizer import tokenizer_in


class RunFolder:
    """Nothing has to be there yet."""

    def __init__(self, path: Path):
        self.path = path
        self.settings = path / "settings.json"
        self.metrics = path / "metrics.jsonl"
        self.lock = path / "lock"
        self.checkpoints = path / "checkpoints"
        self.latest = self.checkpoints / "latest"  # holds the name of the newest checkpoint
        self.profile = path / "profile"
        self.weights = path / "weights"
        self.loss_picture = path / "loss.png"
        self.report = path / "report.html"
        self.sample = path / "sample.txt"
        self.samples = path / "samples.jsonl"  # through training
        self.bad_samples = path / "bad_samples.json"  # of the batch that ended the run

    @property
    def tokenizer(self) -> Path:
        return tokenizer_in(self.path)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def all_checkpoints(self) -> list[Path]:
        """Oldest first. What is being written, damaged or superseded has another kind of name."""
        return sorted(p for p in self.checkpoints.glob("step-*") if p.name[5:].isdigit())
