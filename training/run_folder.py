"""The folder that holds all of a run."""

import json
import platform
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from data.tokenizer import TOKENIZER_FILE
from model import LMConfig
from training.arguments import TrainingArguments
from training.engine import Engine


class RunFolder:
    """Names of everything in a run's folder."""

    def __init__(self, path: Path):
        self.path = path
        self.settings = path / "settings.json"
        self.tokenizer = path / TOKENIZER_FILE
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

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def all_checkpoints(self) -> list[Path]:
        """Oldest first. What is being written, damaged or superseded has another kind of name."""
        return sorted(p for p in self.checkpoints.glob("step-*") if p.name[5:].isdigit())

    def write_settings(
        self, args: TrainingArguments, config: LMConfig, engine: Engine, tokenizer: Path
    ) -> None:
        """What was asked and what ran it, for the reader of the run a month later, and the
        tokenizer, without which its checkpoints say nothing."""
        if not engine.accelerator.is_main_process:
            return
        packages = {
            name: version(name)
            for name in ("torch", "accelerate", "deepspeed", "numpy", "sentencepiece")
        }
        plugin = engine.accelerator.state.deepspeed_plugin
        settings = {
            "command": sys.argv,
            "arguments": vars(args),
            "model": config.to_dict(),
            "engine": engine.name,
            "processes": engine.accelerator.num_processes,
            "deepspeed": plugin.deepspeed_config if plugin else None,
            "packages": packages | {"python": platform.python_version()},
        }
        self.settings.write_text(
            json.dumps(settings, indent=2, default=str) + "\n", encoding="utf-8"
        )
        shutil.copyfile(tokenizer, self.tokenizer)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed torch's generators, the only ones that training uses; another rank, other numbers."""
    torch.manual_seed(seed + 1000003 * rank)
