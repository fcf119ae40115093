"""Real runs of the training programs, each made once: with the same data and flags it is kept."""

import hashlib
import json
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import REPOSITORY
from benchmarks.cli import say
from common.errors import UsageError
from data.shards import DESCRIPTION_FILE
from formats.portable import load_config
from model import Transformer

# What all runs keep and report: the whole validation split, no checkpoints but the last.
QUIET = (
    "--log_interval 10 --log_with none --eval_samples 0 --save_interval 0 --keep_last 1 "
    "--sample_tokens 1 --compile on"
)


@dataclass
class RunResult:
    """What a finished run has left."""

    folder: Path
    losses: dict[int, float]  # step → validation loss, in nats per token
    bits_per_byte: float  # on the validation split, at the end
    step_seconds: float  # median over the log intervals; without validation and the first step
    tokens_per_step: int

    @property
    def steps(self) -> int:
        return max(self.losses)

    @property
    def final(self) -> float:
        return self.losses[self.steps]

    def n_parameters(self) -> int:
        with torch.device("meta"):
            return Transformer(load_config(self.folder / "weights")).num_parameters()


def train(
    out: Path, kind: str, data: Path, flags: list[str], seed: int, stage: str = "pretrain"
) -> RunResult:
    """Make a run, unless it has been made before with the same text and flags.

    Args:
        out: where all runs are kept.
        kind: begins the name of its folder.
        flags: each one a string of flags; the last one is shown.

    Raises UsageError: the training program failed.
    """
    description = (data / DESCRIPTION_FILE).read_text(encoding="utf-8")
    told = "\0".join([str(data.resolve()), description, QUIET, *flags])
    mark = hashlib.sha256(told.encode()).hexdigest()[:8]
    run = out / f"{data.resolve().name}-{kind}-{mark}-seed{seed}"
    if not (run / "weights").exists():
        say(f"{run.name}: {flags[-1]} ...")
        words = [sys.executable, str(REPOSITORY / f"train_{stage}_accelerate.py")]
        words += shlex.split(" ".join([QUIET, *flags]))
        words += ["--seed", str(seed), "--data", str(data), "--out_dir", str(out)]
        words += ["--run_name", run.name, "--resume", "auto"]
        ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode or not (run / "weights").exists():
            raise UsageError(f"{run.name} failed: {''.join(ended.stdout.splitlines()[-1:])}")
    return read(run)


def read(run: Path) -> RunResult:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = list(map(json.loads, lines))
    timed = [row for row in rows if row["step"] > 1 and "step_seconds" in row]
    validated = [row for row in rows if "val_loss" in row]
    return RunResult(
        folder=run,
        losses={row["step"]: row["val_loss"] for row in validated},
        bits_per_byte=validated[-1]["val_bits_per_byte"],
        step_seconds=statistics.median(row["step_seconds"] for row in timed),
        tokens_per_step=timed[0]["tokens"] // timed[0]["step"],
    )
