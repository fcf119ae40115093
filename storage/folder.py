"""The folder that holds all of a run: the names of everything in it, and its lock."""

import json
import os
import socket
from pathlib import Path

from common.atomic import try_lock
from common.errors import UsageError
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


_held: list[int] = []  # descriptors of the lock files


def lock(path: Path, otherwise: str = "--run_name") -> None:
    """Hold the folder of this lock file until `release_locks`; the system drops the lock of a
    killed process. Raises UsageError: a live process holds it; `otherwise` names another one."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if not try_lock(descriptor):
        os.close(descriptor)
        holder = path.read_text(encoding="utf-8", errors="replace")
        raise UsageError(
            f"{path.parent} is in use by {holder}: wait for it, or take another {otherwise}"
        )
    _held.append(descriptor)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def release_locks() -> None:
    """Let go of every run folder, in a process that lives on after its runs."""
    while _held:
        os.close(_held.pop())


# Processes forked off to read data outlive a killed parent by seconds.
os.register_at_fork(after_in_child=release_locks)
