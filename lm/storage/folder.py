"""The folder of a run: the paths of its files, its settings and its lock."""

import json
import os
import socket
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

from lm.common.atomic import try_lock
from lm.common.errors import UsageError
from lm.data.chat_template import TEMPLATE_FILE
from lm.data.tokenizer import tokenizer_in


class RunFolder:
    """The paths in a run folder. The folder and its files need not exist."""

    def __init__(self, path: Path):
        self.path = path
        self.settings = path / "settings.json"  # see lm.training.starting_point.write_settings
        self.template = path / TEMPLATE_FILE  # only in a run that trains on conversations
        self.metrics = path / "metrics.jsonl"  # the logged numbers, one JSON object per line
        self.lock = path / "lock"  # locked while a process trains here
        self.checkpoints = path / "checkpoints"  # see lm/storage/checkpoint.py
        self.latest = self.checkpoints / "latest"  # holds the name of the newest checkpoint
        self.profile = path / "profile"  # traces of --profile
        self.weights = path / "weights"  # portable weights, written at the end of the run
        self.base = path / "base"  # the initial weights of a run with adapters
        self.adapter = path / "adapter"  # the trained weights of such a run, in PEFT's format
        self.loss_picture = path / "loss.png"  # loss curves
        self.report = path / "report.html"  # see lm/report/page.py
        self.sample = path / "sample.txt"  # text of the finished model
        self.samples = path / "samples.jsonl"  # text that the model wrote during training

    @property
    def tokenizer(self) -> Path:
        return tokenizer_in(self.path)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def all_checkpoints(self) -> list[Path]:
        """List the complete checkpoints, oldest first."""
        return sorted(p for p in self.checkpoints.glob("step-*") if p.name[5:].isdigit())


def step_of(checkpoint: Path) -> int:
    """Return the step after which the checkpoint was saved, from its name."""
    return int(checkpoint.name.removeprefix("step-"))


def read_settings(path: Path) -> dict:
    """Read settings.json; return {} if it is missing or damaged."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


_held: dict[Path, int] = {}  # locks that this process holds: resolved path → file descriptor


def claim(run: RunFolder) -> RunFolder:
    """Lock a run as `lock` does, unless this process has already locked it; return the run."""
    if run.lock.resolve() not in _held:
        lock(run.lock)
    return run


def claim_new(run: RunFolder) -> RunFolder:
    """Make, lock and return the folder of a run without a name. If the folder exists, as for runs
    that start in the same second, a number is added. Raises UsageError as `lock` does."""
    numbered = (run.path.with_name(f"{run.path.name}-{n}") for n in count(2))
    for path in chain([run.path], numbered):
        with suppress(OSError):  # `lock` gives the reason
            path.mkdir(parents=True)
            break
        if not path.is_dir():
            break
    return claim(RunFolder(path))


def lock(path: Path, otherwise: str = "--run_name") -> None:
    """Lock the file `path` until `release_locks` or the end of the process; create its folder.
    Raises UsageError if the file cannot be opened, or if another process holds the lock. In the
    second case the message suggests another value for the setting `otherwise`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UsageError(f"{path.parent} cannot be used: {error.strerror}") from error
    if not try_lock(descriptor):
        os.close(descriptor)
        holder = path.read_text(encoding="utf-8", errors="replace")
        raise UsageError(f"{path.parent} is in use by {holder}: wait, or use another {otherwise}")
    _held[path.resolve()] = descriptor
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def release_locks() -> None:
    """Release every lock of this process, so that the process can start another run."""
    while _held:
        os.close(_held.popitem()[1])


# Data loader processes may live seconds longer than a killed parent. They must not keep its locks.
os.register_at_fork(after_in_child=release_locks)
