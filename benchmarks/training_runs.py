"""Real runs of the training programs, each made once: with the same data and flags it is kept."""

import hashlib
import shlex
import subprocess
import sys
from pathlib import Path

from common.errors import UsageError
from data.shards import DESCRIPTION_FILE


def folder_of(out: Path, kind: str, data: Path, flags: list[str], seed: int) -> Path:
    """Where a run is kept: another folder for another text, or anything it is told."""
    description = (data / DESCRIPTION_FILE).read_text(encoding="utf-8")
    told = "\0".join([str(data.resolve()), description, *flags])
    mark = hashlib.sha256(told.encode()).hexdigest()[:8]
    return out / f"{data.resolve().name}-{kind}-{mark}-seed{seed}"


def make(run: Path, data: Path, flags: list[str], seed: int, stage: str = "pretrain") -> None:
    """One run, unless it has been made before. Raises UsageError: the training program failed."""
    if (run / "weights").exists():
        return
    print(f"{run.name}: {flags[-1]} ...", file=sys.stderr, flush=True)
    words = [sys.executable, f"train_{stage}_accelerate.py", *shlex.split(" ".join(flags))]
    words += ["--seed", str(seed), "--data", str(data), "--out_dir", str(run.parent)]
    words += ["--run_name", run.name, "--resume", "auto"]
    # Does not outlive an interruption of this process.
    ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode or not (run / "weights").exists():
        raise UsageError(f"{run.name} failed: {''.join(ended.stdout.splitlines()[-1:])}")
