"""What the start block says of memory and engines, by figures that a test chooses."""

import re
from types import SimpleNamespace

import pytest
import torch

from model import LMConfig
from runs.folder import RunFolder
from training import start_block
from training.arguments import TrainingArguments
from training.engine.compilation import Compilation
from training.engine.estimate import DDP, GIB, MARGIN, OVERHEAD, Beside, estimate
from training.engine.launch import Engine
from training.initial_weights import InitialWeights
from training.prepare import Prepared, shapes_of
from training.resume import StartingPoint
from training.stage_arguments import SFTArguments

CONFIG = LMConfig()


@pytest.fixture
def run_of(monkeypatch, tmp_path):
    """A run of two processes under ZeRO-2, in which a process can have `room` bytes."""

    def make(room=None, device="cpu", offload=False, config=CONFIG, args=None, **changes):
        args = args or TrainingArguments(accumulation_steps=8)
        zero = {"stage": 2} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
        file = {"zero_optimization": zero, "data_types": {"grad_accum_dtype": "fp32"}}
        accelerator = SimpleNamespace(
            num_processes=2, device=torch.device(device), mixed_precision="bf16"
        )
        monkeypatch.setattr(start_block, "available_memory", lambda device, processes: room)
        prepared = {
            **{"args": args, "start": StartingPoint(RunFolder(tmp_path))},
            **{"initial": InitialWeights({}), "teacher": None, "train_set": None, "val_set": 1},
            **{"config": config, "shapes": shapes_of(config, args), "identity": {}},
            **{"total_steps": 1000, "schedule_note": None},
        }
        return SimpleNamespace(
            args=args,
            engine=Engine(accelerator, "DeepSpeed ZeRO-2", file),
            accelerator=accelerator,
            folder=RunFolder(tmp_path),
            total_steps=changes.get("total_steps", 1000),
            prepared=Prepared(**prepared | changes),
            built=SimpleNamespace(compilation=Compilation(False, "as asked")),
        )

    return make


def enough_for(run) -> int:
    """Bytes with which a process of the run just fits."""
    needed = estimate(run.engine.kind, start_block._needs(run)[0])
    margin = 1 if run.accelerator.device.type == "cpu" else MARGIN
    return int(needed.held + needed.teacher + needed.working * margin + OVERHEAD) + 1


@pytest.mark.parametrize(
    ("device", "offload"), [("cpu", False), ("cpu", True), ("cuda", False), ("cuda", True)]
)
def test_a_run_that_needs_more_than_there_is_is_warned_of_and_told_the_flags(
    run_of, device, offload
):
    enough = enough_for(run_of(device=device, offload=offload))
    assert start_block.warnings(run_of(None, device, offload)) == []
    assert start_block.warnings(run_of(enough, device, offload)) == []
    (line,) = start_block.warnings(run_of(enough - 2, device, offload))
    assert line.startswith("WARNING: a process may need ")
    assert f" and can have {(enough - 2) / GIB:.1f}: a smaller --batch_size" in line


def test_offloading_spares_the_memory_of_a_gpu_alone(run_of):
    needed = {
        (device, offload): enough_for(run_of(device=device, offload=offload))
        for device in ("cpu", "cuda")
        for offload in (False, True)
    }
    assert needed["cuda", True] < needed["cuda", False]
    assert needed["cpu", True] == needed["cpu", False]
    for offload in (False, True):
        run = run_of(device="cuda", offload=offload)
        line = start_block._memory(estimate(run.engine.kind, start_block._needs(run)[0]))
        assert (" in RAM" in line) == offload


def test_the_process_with_the_least_counts(run_of, monkeypatch):
    enough = enough_for(run_of())
    monkeypatch.setattr(Engine, "largest", lambda self, mine, *how: max(mine, -(enough - 2)))
    assert len(start_block.warnings(run_of(2 * enough))) == 1


def test_sums_of_gradients_that_are_not_fp32_are_said(run_of):
    run = run_of()
    assert start_block._precision(run) == "bf16"
    del run.engine.deepspeed["data_types"]
    assert start_block._precision(run) == "bf16, gradients added up in 16 bits too"
    run.args.dtype, run.accelerator.mixed_precision = "float32", "no"
    assert start_block._precision(run) == "fp32"


def test_a_teacher_is_named_and_counted(run_of):
    config = LMConfig(dim=128, n_layers=2)
    shapes = shapes_of(config, TrainingArguments())
    source = SimpleNamespace(path="out/runs/mine/weights")
    beside = Beside(shapes, DDP)
    small = SimpleNamespace(shapes=shapes, source=source, beside=beside, config=config, zero=None)
    needed = enough_for(run_of(teacher=small))
    assert needed > enough_for(run_of()) + 2 * small.shapes.num_parameters()
    said = start_block._teacher(SimpleNamespace(found=small, held=2_400_000), "bfloat16")
    assert said.startswith("out/runs/mine/weights: 1.20 million (dim 128, 2 layers, 8 heads, 2 kv")
    assert said.endswith("never trained; whole on each process, 2.4 MB of weights per process")


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
    (line,) = start_block.warnings(run_of(**changes))
    assert re.search(keyword, line)


def test_a_folder_that_other_machines_do_not_see_is_warned_of(run_of, monkeypatch):
    monkeypatch.setattr(Engine, "total", lambda self, mine: mine + 1)
    (line,) = start_block.warnings(run_of())
    assert "not every machine sees" in line
