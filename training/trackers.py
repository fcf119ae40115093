"""Accelerate's experiment trackers, checked before anything is started."""

import hashlib
import importlib.util
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import filter_trackers

from common.errors import UsageError
from model import LMConfig
from training.arguments import TrainingArguments


def require_trackers(names: list[str]) -> None:
    """Raise UsageError where a tracker's package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"--log_with {name}: that package is missing (pip install {name})")


def start_trackers(
    accelerator: Accelerator, args: TrainingArguments, run: Path, model: LMConfig, first_step: int
) -> None:
    """Give the accelerator its trackers; `accelerator.log` then reaches all of them.

    TensorBoard forgets what an interrupted run wrote for `first_step` and later.
    """
    if not args.trackers:
        return
    accelerator.log_with = filter_trackers(args.trackers, str(run))
    accelerator.project_configuration.logging_dir = str(run)
    # A resumed run goes on under the same number. SwanLab wants 21 letters and digits.
    number = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:21]
    same_run = {"id": number, "resume": "allow"}
    options = {
        "tensorboard": {"purge_step": first_step},
        "wandb": {"name": run.name, "dir": str(run), **same_run},
        "swanlab": {"experiment_name": run.name, "logdir": str(run / "swanlog"), **same_run},
    }
    settings, plain = vars(args) | model.to_dict(), bool | int | float | str
    config = {k: v if isinstance(v, plain) else str(v) for k, v in settings.items()}
    project = "pretrain"
    if args.trackers == ["tensorboard"]:  # it would make a folder of "hyperparameters" per start
        project, config = "tensorboard", None
    accelerator.init_trackers(project, config, options)
