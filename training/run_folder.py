"""The folder that holds all of a run."""

import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from model import LMConfig
from training.arguments import TrainingArguments
from training.engine import Engine
from training.errors import UsageError

CHECKPOINT_GLOB = "step-*"


class RunFolder:
    """Names of everything in a run's folder.

    settings.json, metrics.jsonl, tensorboard/, checkpoints/step-N/, profile/, weights/, loss.png,
    sample.txt
    """

    def __init__(self, path: Path):
        self.path = path
        self.settings = path / "settings.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.profile = path / "profile"
        self.weights = path / "weights"
        self.loss_picture = path / "loss.png"
        self.sample = path / "sample.txt"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def newest_checkpoint(self) -> Path | None:
        found = sorted(p for p in self.checkpoints.glob(CHECKPOINT_GLOB) if p.name[5:].isdigit())
        return found[-1] if found else None

    def write_settings(self, args: TrainingArguments, config: LMConfig, engine: Engine) -> None:
        """What was asked and what ran it, for the reader of the run a month later."""
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


def choose_run(args: TrainingArguments, accelerator: Accelerator) -> tuple[RunFolder, Path | None]:
    """The run's folder and the checkpoint to resume from, the same on every process.

    Raises:
        UsageError: nothing to resume at the path given, or a new run would fall on an old one.
    """
    answer: list = [None, None, None]
    if accelerator.is_main_process:
        try:
            answer[:2] = _choose(args)
        except UsageError as error:
            answer[2] = str(error)
    if accelerator.num_processes > 1:
        broadcast_object_list(answer)
    run, checkpoint, problem = answer
    if problem is not None:
        raise UsageError(problem)
    return RunFolder(run), checkpoint


def _choose(args: TrainingArguments) -> tuple[Path, Path | None]:
    out = Path(args.out_dir)
    if args.resume == "auto":
        runs = [out / args.run_name] if args.run_name else list(out.glob("*"))
        checkpoints = [c for run in runs if (c := RunFolder(run).newest_checkpoint())]
        if checkpoints:
            newest = max(checkpoints, key=lambda path: path.stat().st_mtime)
            return newest.parent.parent, newest
        print(
            f"--resume auto: no checkpoint in {runs[0] if args.run_name else out}, a new run starts"
        )
    elif args.resume is not None:
        path = Path(args.resume)
        checkpoint = RunFolder(path).newest_checkpoint() or path
        if not (checkpoint / "state.json").is_file():
            raise UsageError(
                f"--resume {args.resume}: neither a run with checkpoints nor a checkpoint"
            )
        return checkpoint.resolve().parent.parent, checkpoint.resolve()
    run = out / (args.run_name or time.strftime("%Y%m%d-%H%M%S"))
    if RunFolder(run).metrics.exists() and args.resume is None:
        raise UsageError(
            f"{run} holds a run already: pass --resume auto to go on with it, or another --run_name"
        )
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the run folder {run}: {error.strerror}") from error
    return run, None


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed torch's generators, the only ones that training uses; another rank, other numbers."""
    torch.manual_seed(seed + 1000003 * rank)
