"""What the start block says of memory, by figures that a test chooses."""

from types import SimpleNamespace

import pytest
import torch

from model import LMConfig
from runs.folder import RunFolder
from training import start_block
from training.arguments import TrainingArguments
from training.engine.launch import Engine
from training.engine.memory import GIB, OVERHEAD

N = 10**9  # parameters
ACTIVATIONS = 5 * GIB


@pytest.fixture
def run_of(monkeypatch, tmp_path):
    """A run of two processes under ZeRO-2, in which a process can have `room` bytes."""

    def make(room: int | None, device="cpu", offload=False, flash=True) -> SimpleNamespace:
        zero = {"stage": 2} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
        accelerator = SimpleNamespace(num_processes=2, device=torch.device(device))
        monkeypatch.setattr(start_block, "available_memory", lambda device, processes: room)
        monkeypatch.setattr(start_block, "_activations", lambda run: ACTIVATIONS)
        monkeypatch.setattr(start_block, "space_warning", lambda *run: None)
        return SimpleNamespace(
            args=TrainingArguments(accumulation_steps=8),
            engine=Engine(accelerator, "DeepSpeed ZeRO-2", {"zero_optimization": zero}),
            accelerator=accelerator,
            folder=RunFolder(tmp_path),
            learning_rate=SimpleNamespace(total_steps=1000),
            built=SimpleNamespace(
                n_parameters=N, n_muon_parameters=0, config=LMConfig(use_flash_attn=flash)
            ),
        )

    return make


# Bytes per parameter of two processes: DDP 16, ZeRO-1 2 + 6 + 12 / 2, ZeRO-2 2 + 6 / 2 + 12 / 2.
DDP, ZERO_1, ZERO_2 = (each * N + ACTIVATIONS + OVERHEAD for each in (16, 14, 11))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"room": DDP}, "DDP"),
        ({"room": DDP - 1}, "ZeRO-1"),
        ({"room": ZERO_1 - 1}, None),
        ({"room": None}, None),
        ({"room": ZERO_1, "device": "cuda"}, "ZeRO-1"),
        ({"room": DDP, "offload": True}, None),
    ],
    ids=lambda value: str(value),
)
def test_another_engine_is_advised_where_it_fits(run_of, changes, named):
    line = start_block._advice(run_of(**changes))
    assert line is None if named is None else line.startswith(f"{named} would")


def test_a_run_that_needs_more_than_there_is_is_warned_of_and_told_the_flags(run_of):
    assert start_block.warnings(run_of(ZERO_2)) == []
    assert start_block.warnings(run_of(None)) == []
    (line,) = start_block.warnings(run_of(ZERO_2 - 1))
    needed = ZERO_2 / GIB
    assert line.startswith(
        f"WARNING: a process is expected to need {needed:.1f} GiB of memory and can have "
        f"{needed:.1f}: a smaller --batch_size with larger --accumulation_steps"
    )
    assert "--use_flash_attn" not in line
    (line,) = start_block.warnings(run_of(ZERO_2 - 1, flash=False))
    assert line.endswith("--use_flash_attn")


def test_an_optimizer_that_is_offloaded_needs_no_memory_of_the_gpu(run_of):
    assert start_block.warnings(run_of(ZERO_2 - 6 * N, device="cuda", offload=True)) == []
    assert len(start_block.warnings(run_of(ZERO_2 - 6 * N - 1, device="cuda", offload=True))) == 1
    # On a CPU it would only move from the memory into the memory.
    assert len(start_block.warnings(run_of(ZERO_2 - 1, offload=True))) == 1


def test_the_process_with_the_least_counts(run_of, monkeypatch):
    monkeypatch.setattr(Engine, "largest", lambda self, mine: max(mine, -(ZERO_2 - 1)))
    assert len(start_block.warnings(run_of(2 * ZERO_2))) == 1
