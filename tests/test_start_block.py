"""What the start block says of memory and engines, by figures that a test chooses."""

import re
from types import SimpleNamespace

import pytest
import torch

from model import LMConfig
from runs.folder import RunFolder
from training import start
from training.arguments import SFTArguments, TrainingArguments
from training.engine.compilation import Compilation
from training.engine.estimate import GIB, MARGIN, OVERHEAD, Beside, estimate
from training.engine.kinds import DDP
from training.engine.launch import Engine
from training.prepare import Prepared, shapes_of
from training.resume import StartingPoint

CONFIG = LMConfig()


@pytest.fixture
def run_of(monkeypatch, tmp_path):
    """A run of two processes under ZeRO-2, in which a process can have `room` bytes."""

    def make(room=None, device="cpu", offload=False, args=None, **changes):
        args = args or TrainingArguments(accumulation_steps=8)
        zero = {"stage": 2} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
        file = {"zero_optimization": zero, "data_types": {"grad_accum_dtype": "fp32"}}
        accelerator = SimpleNamespace(num_processes=2, device=torch.device(device))
        monkeypatch.setattr(start, "available_memory", lambda device, processes: room)
        prepared = {
            **{"args": args, "start": StartingPoint(RunFolder(tmp_path)), "source": None},
            **{"teacher": None, "train_set": None, "val_set": 1, "config": CONFIG},
            **{"shapes": shapes_of(CONFIG, args), "identity": {}, "schedule_note": None},
        }
        return SimpleNamespace(
            args=args,
            engine=Engine(accelerator, "DeepSpeed ZeRO-2", file),
            accelerator=accelerator,
            folder=RunFolder(tmp_path),
            total_steps=changes.get("total_steps", 1000),
            prepared=Prepared(**prepared | {"total_steps": 1000} | changes),
            built=SimpleNamespace(compilation=Compilation(False, "as asked")),
        )

    return make


def enough_for(run) -> int:
    """Bytes with which a process of the run just fits."""
    device = run.accelerator.device
    needed = estimate(run.engine.kind, run.prepared.workload(2, device, compiled=False))
    margin = 1 if device.type == "cpu" else MARGIN
    return int(needed.held + needed.teacher + needed.working * margin + OVERHEAD) + 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("offload", [False, True])
def test_a_run_that_needs_more_than_there_is_is_warned_of_and_told_the_flags(
    run_of, device, offload
):
    run = run_of(device=device, offload=offload)
    enough = enough_for(run)
    assert start.warnings(run_of(None, device, offload)) == []
    assert start.warnings(run_of(enough, device, offload)) == []
    (line,) = start.warnings(run_of(enough - 2, device, offload))
    assert line.startswith("WARNING: a process may need ")
    assert f" and can have {(enough - 2) / GIB:.1f}: a smaller --batch_size" in line
    # Offloading spares the memory of a GPU alone.
    spares = offload and device == "cuda"
    assert (enough < enough_for(run_of(device=device))) == spares


def test_the_process_with_the_least_counts(run_of, monkeypatch):
    enough = enough_for(run_of())
    monkeypatch.setattr(Engine, "largest", lambda self, mine, *how: max(mine, -(enough - 2)))
    assert len(start.warnings(run_of(2 * enough))) == 1


def test_a_teacher_is_counted(run_of):
    shapes = shapes_of(LMConfig(dim=128, n_layers=2), TrainingArguments())
    teacher = SimpleNamespace(beside=Beside(shapes, DDP))
    needed = enough_for(run_of(teacher=teacher))
    assert needed > enough_for(run_of()) + 2 * shapes.num_parameters()


@pytest.mark.parametrize(
    ("changes", "keyword"),
    [
        ({"val_set": None}, "NO VALIDATION: .* train with a smaller --max_seq_len"),
        (
            {"val_set": None, "args": SFTArguments(data="x")},
            "NO VALIDATION: .* with a larger --max_seq_len",
        ),
        ({"total_steps": 49}, "49 steps are hardly training"),
    ],
)
def test_a_setting_that_is_hardly_meant_is_warned_of(run_of, changes, keyword):
    (line,) = start.warnings(run_of(**changes))
    assert re.search(keyword, line)


def test_a_folder_that_other_machines_do_not_see_is_warned_of(run_of, monkeypatch):
    monkeypatch.setattr(Engine, "total", lambda self, mine: mine + 1)
    (line,) = start.warnings(run_of())
    assert "not every machine sees" in line
