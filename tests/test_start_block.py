"""What the start block says of memory, by figures that a test chooses."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training.engine.memory import GIB, expect, sum_bytes
from training.recorded_teacher import Recording

from model import LMConfig
from runs.folder import RunFolder
from training import start_block
from training.arguments import TrainingArguments
from training.engine import memory, workload
from training.engine.compilation import Compilation
from training.engine.kinds import engines
from training.engine.launch import Engine
from training.engine.zero_inference import ZeroInference
from training.teacher import TeacherWeights

KINDS = {kind.config: kind for kind in engines(LMConfig().dim)}
ZERO_2 = KINDS["zero2"]


@pytest.fixture
def run_of(monkeypatch, tmp_path):
    """A run of two processes under ZeRO-2, in which a process can have `room` bytes."""

    def make(room: int | None, device="cpu", offload=False, flash=True) -> SimpleNamespace:
        zero = {"stage": 2} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
        accelerator = SimpleNamespace(num_processes=2, device=torch.device(device))
        monkeypatch.setattr(start_block, "available_memory", lambda device, processes: room)
        monkeypatch.setattr(start_block, "space_warning", lambda *run: None)
        monkeypatch.setattr(workload, "attention_kernel", lambda *shape: ("flash", False))
        return SimpleNamespace(
            args=TrainingArguments(accumulation_steps=8),
            engine=Engine(
                accelerator,
                "DeepSpeed ZeRO-2",
                {"zero_optimization": zero, "data_types": {"grad_accum_dtype": "fp32"}},
            ),
            accelerator=accelerator,
            folder=RunFolder(tmp_path),
            learning_rate=SimpleNamespace(total_steps=1000),
            teacher=None,
            built=SimpleNamespace(
                n_parameters=1,
                n_trained=1,
                lora=None,
                config=LMConfig(use_flash_attn=flash),
                compilation=Compilation(False, "as asked"),
            ),
        )

    return make


@pytest.fixture
def needs(run_of):
    """Bytes that a process of such a run needs under the engine of that name."""

    def of(name: str, **changes) -> int:
        _, work = start_block.in_use(run_of(None, **changes))
        return memory.needs(KINDS[name], work)

    return of


def test_a_run_is_planned_as_what_it_is(run_of):
    kind, work = start_block.in_use(run_of(None, device="cuda", offload=True))
    assert kind.name == KINDS["zero2_offload"].name
    assert (work.processes, work.accumulation_steps, work.on_cpu) == (2, 8, False)
    assert work.parameters.total == 25_829_888


def test_memory_of_other_models_is_not_there_for_this_one(run_of, needs):
    others = 3 * GIB
    enough = needs("zero2") + others
    assert start_block.warnings(run_of(enough), others) == []
    (line,) = start_block.warnings(run_of(enough - GIB), others)
    can_have = (needs("zero2") - GIB) / GIB
    assert f" and can have {can_have:.1f} beside the other models: a smaller --batch" in line
    (line,) = start_block.warnings(run_of(GIB), others)
    assert " and can have 0.0 beside the other models: " in line


def test_a_run_that_needs_more_than_there_is_is_warned_of_and_told_the_flags(run_of, needs):
    enough = needs("zero2")
    assert start_block.warnings(run_of(enough)) == []
    assert start_block.warnings(run_of(None)) == []
    (line,) = start_block.warnings(run_of(enough - 1))
    assert line.startswith(
        f"WARNING: a process may need {enough / GIB:.1f} GiB of memory and can have "
        f"{enough / GIB:.1f}: a smaller --batch_size with larger --accumulation_steps"
    )
    assert "--use_flash_attn" not in line
    (line,) = start_block.warnings(run_of(needs("zero2", flash=False) - 1, flash=False))
    assert "--use_flash_attn" in line


def test_ddp_is_said_with_the_flag_that_gives_deepspeed(run_of):
    engine = run_of(None).engine
    assert start_block._hint(engine) == ""
    engine.deepspeed = None
    assert "--use_deepspeed" in start_block._hint(engine)
    engine.accelerator.num_processes = 1
    assert start_block._hint(engine) == ""


def test_sums_of_gradients_that_are_not_fp32_are_said(run_of):
    assert start_block._precision("bf16", 4) == "bf16"
    assert start_block._precision("no", 4) == "fp32"
    run = run_of(None)
    assert sum_bytes(*start_block.in_use(run)) == 4
    del run.engine.deepspeed["data_types"]
    sums = sum_bytes(*start_block.in_use(run))
    assert start_block._precision("bf16", sums) == "bf16, gradients added up in 16 bits too"


def test_an_optimizer_that_is_offloaded_needs_no_memory_of_the_gpu(run_of, needs):
    enough = needs("zero2_offload", device="cuda")
    assert enough < needs("zero2", device="cuda")
    assert start_block.warnings(run_of(enough, device="cuda", offload=True)) == []
    (line,) = start_block.warnings(run_of(enough - 1, device="cuda", offload=True))
    assert "ZeRO-3, all on the CPU needs" in line
    # On a CPU it would only move from the memory into the memory.
    assert needs("zero2_offload") >= needs("zero2")


def test_the_process_with_the_least_counts(run_of, needs, monkeypatch):
    enough = needs("zero2")
    monkeypatch.setattr(Engine, "largest", lambda self, mine: max(mine, -(enough - 1)))
    assert len(start_block.warnings(run_of(2 * enough))) == 1


def test_the_teacher_is_named_and_counted(run_of):
    run, config = run_of(None), LMConfig(dim=128, n_layers=2)
    source = SimpleNamespace(path="out/runs/mine/weights")
    zero = ZeroInference({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    held = TeacherWeights(source, config, None).beside.parameters.total * 2 // 2
    for divided, said in ((None, "whole on each process"), (zero, "ZeRO-3, parameters on the CPU")):
        found = TeacherWeights(source, config, divided)
        run.teacher = SimpleNamespace(found=found, held=held)
        line = start_block._teacher(run.teacher, "bfloat16")
        assert line.startswith("out/runs/mine/weights: 1.20 million (dim 128, 2 layers, 8 heads, 2")
        assert line.endswith(f"never trained; {said}, 1.2 MB of weights per process")
        plan = expect(*start_block.in_use(run))
        assert plan.teacher == held * (1 if divided else 2)
        assert f" {plan.teacher / GIB:.2f} the teacher, " in start_block._memory(plan)
    (line,) = start_block.warnings(run)
    assert line.startswith("WARNING: the teacher, out/runs/mine/weights, is smaller than its stud")
    run.teacher = SimpleNamespace(found=Recording(Path("out"), 2.0, {}), held=0)
    assert start_block.warnings(run) == []
    run.teacher = SimpleNamespace(found=found, held=held)
    run.built.config = config
    assert start_block.warnings(run) == []
    run.accelerator.device = torch.device("cuda")
    plan = expect(*start_block.in_use(run))
    assert (plan.teacher, plan.teacher_in_ram) == (0, held)
    said = f", {held / GIB:.2f} the teacher in RAM, besides about 1 GiB"
    assert start_block._memory(plan).endswith(f"{said} for Python and PyTorch")


def test_the_memory_line_says_what_lies_elsewhere(run_of):
    kind, work = start_block.in_use(run_of(None, device="cuda", offload=True))
    plan = expect(kind, work)
    line = start_block._memory(plan)
    assert line.startswith(f"about {plan.peak / GIB:.2f} GiB per process expected (")
    assert f"{plan.held / GIB:.2f} weights and optimizer" in line
    assert f", {plan.host / GIB:.2f} in RAM, besides about 1 GiB" in line
    assert "in RAM" not in start_block._memory(expect(ZERO_2, work))
