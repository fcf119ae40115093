"""Runs of train_distillation_accelerate.py in turn in the same processes, each with another pair of
engines. Started by test_distillation.py, which writes FOLDER/runs.json and reads what this leaves.

    accelerate launch --multi_gpu ... distilling_engines.py FOLDER
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator
from torch import distributed

import train_distillation_accelerate
from training import start
from training.engine.partition import gathered, shape_of
from training.interruption import leave
from training.teacher import Teacher

REPOSITORY = Path(__file__).resolve().parent.parent.parent
LINEAR = torch.nn.functional.linear
TEACHERS = []


class Noted(Teacher):
    def __init__(self, *args):
        super().__init__(*args)
        TEACHERS.append(self)
        assert torch.nn.functional.linear is LINEAR, "the student's linear layers are others now"


def facts(teacher: Teacher) -> dict:
    """Of a teacher whose student has been trained."""
    saved, unchanged = teacher.found.source.tensors(), True
    shares = [getattr(p, "ds_tensor", p) for p in teacher.model.parameters()]
    parameters = dict(teacher.model.named_parameters())
    for name, parameter in parameters.items():
        with gathered(parameter):
            unchanged &= torch.equal(parameter.data, saved[name].to(parameter.dtype))
    return {
        "unchanged": unchanged,
        "trained": any(p.requires_grad or p.grad is not None for p in parameters.values()),
        "held": sum(p.numel() * p.element_size() for p in shares),
        "bytes": sum(shape_of(p).numel() * p.element_size() for p in parameters.values()),
    }


def go_back(path: Path, source: Path, step: int) -> None:
    """Make of a run another one, that was killed after so many steps."""
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("weights", "step-*", "lock"))
    name = f"step-{step:08d}"
    shutil.copytree(source / "checkpoints" / name, path / "checkpoints" / name)


def main(folder: Path) -> None:
    start.Teacher = Noted
    # It would take the processes' groups along, and the next run needs them.
    Accelerator.end_training = lambda self: None
    result = {}
    for name, run in json.loads((folder / "runs.json").read_text()).items():
        torch.nn.functional.linear = LINEAR  # ZeRO-3 leaves another one behind, for a student
        launch = yaml.safe_load((REPOSITORY / "configs" / f"{run['student']}.yaml").read_text())
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        if "deepspeed_config" in launch:
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            file = REPOSITORY / launch["deepspeed_config"]["deepspeed_config_file"]
            os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(file)
        if "killed" in run and os.environ["RANK"] == "0":
            go_back(folder / "runs" / name, folder / "runs" / run["killed"], step=3)
        if distributed.is_initialized():
            distributed.barrier()
        flags = ["--out_dir", str(folder / "runs"), "--run_name", name, *run["flags"]]
        train_distillation_accelerate.main(flags)
        everyone = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, facts(TEACHERS[-1]))
        result[name] = everyone
    if distributed.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    finally:
        leave()
