"""The estimate of memory and traffic, compared with formulas and with measured runs."""

from dataclasses import replace

import pytest
import torch

from lm.engine.hardware import GIB
from lm.engine.memory import (
    CPU_KEEPS,
    LARGEST_BATCH,
    MARGIN,
    OVERHEAD,
    Workload,
    can_coalesce,
    estimate,
    fits,
    largest_batch,
)
from lm.engine.strategy import DDP, strategies
from lm.training.arguments import TrainingArguments
from model import LMConfig, Transformer
from model.lora import LoRA, add_lora

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPE = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 112}
SHAPE |= {"hidden_dim": 192, "max_seq_len": 128}
STRATEGIES = {strategy.config: strategy for strategy in strategies()}


def workload(
    *, device=GPU, processes=1, compiled=False, masked=False, lora=None, shape=None, **args
) -> Workload:
    with torch.device("meta"):
        shapes = Transformer(LMConfig(**SHAPE | (shape or {})))
        if lora:
            add_lora(shapes, lora)
    return Workload(
        args=TrainingArguments(**{"dtype": "bfloat16", "batch_size": 3} | args),
        shapes=shapes,
        processes=processes,
        device=device,
        compiled=compiled,
        masked=masked,
    )


@pytest.mark.parametrize(
    ("engine", "dtype", "per_parameter", "in_ram", "on_nvme"),
    [  # bytes per parameter in each of 4 processes
        ("ddp", "bfloat16", 4 + 4 + 8, 0, 0),
        ("zero1", "bfloat16", 2 + 4 + 12 / 4, 0, 0),
        ("zero2", "bfloat16", 2 + 4 / 4 + 12 / 4, 0, 0),
        ("zero3", "bfloat16", 2 / 4 + 4 / 4 + 12 / 4, 0, 0),
        ("zero2", "float32", 4 + 4 / 4 + 12 / 4, 0, 0),
        ("zero2_offload", "bfloat16", 2 + 4 / 4, 18 / 4, 0),
        ("zero3_offload", "bfloat16", 0, 22 / 4, 0),
        ("zero_infinity", "bfloat16", 0, 4 / 4 + 16 / 4, 18 / 4),
    ],
)
def test_the_bytes_of_each_state_equal_its_formula(engine, dtype, per_parameter, in_ram, on_nvme):
    work = workload(processes=4, dtype=dtype)
    found, n = estimate(STRATEGIES[engine], work), work.shapes.num_parameters()
    assert found.held == pytest.approx(per_parameter * n, abs=1)
    assert found.nvme == pytest.approx(on_nvme * n, abs=1)
    buffers = 2 * 5 * 50_000_000 if engine == "zero_infinity" else 0  # 5 buffers, 2 bytes each
    assert found.ram == pytest.approx(in_ram * n + buffers, abs=1)


def test_muon_and_adapters_need_less_memory_and_a_teacher_needs_more():
    plain = workload(device=CPU)
    muon = workload(device=CPU, optimizer="muon")
    matrices = 2 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 192 * 64)
    assert estimate(DDP, plain).held - estimate(DDP, muon).held == 4 * matrices
    assert [k.name for k in strategies() if k.takes_muon] == ["DDP", "ZeRO-1", "ZeRO-2"]
    experts = {"use_moe": True, "n_routed_experts": 8}
    muon, plain_moe = (
        workload(device=CPU, shape=experts, optimizer=name) for name in ("muon", "adamw")
    )
    matrices += 2 * (7 * 3 * 192 * 64 + 8 * 64)  # seven more experts, and the router
    assert estimate(DDP, plain_moe).held - estimate(DDP, muon).held == 4 * matrices
    lora = workload(device=CPU, lora=LoRA(4, 8.0, "layers", True))
    assert estimate(DDP, lora).held == 2 * plain.shapes.num_parameters() + 16 * lora.trained
    whole = estimate(DDP, replace(plain, teacher=plain.shapes))
    assert whole.held - estimate(DDP, plain).held == 2 * plain.shapes.num_parameters()
    zero3 = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    alone = workload(processes=2)
    offloaded = replace(alone, teacher=plain.shapes, teacher_config=zero3)
    assert estimate(DDP, offloaded).held == estimate(DDP, alone).held
    assert estimate(DDP, offloaded).ram == plain.shapes.num_parameters()  # 2 bytes / 2 processes


@pytest.mark.parametrize(
    ("shape", "recompute", "measured"),
    [  # GiB that `python train_pretrain_accelerate.py` used besides libraries: 2 cores, fp32
        ({}, "off", 0.67),
        ({"dropout": 0.1}, "off", 1.09),
        ({"n_heads": 8, "vocab_size": 6400}, "off", 0.94),
        ({"n_heads": 8, "vocab_size": 6400}, "blocks", 0.50),
        ({"n_heads": 8}, "off", 0.72),
        ({"n_heads": 8, "dropout": 0.1}, "off", 1.58),
        ({"n_heads": 8, "use_flash_attn": False}, "off", 1.12),
        ({"n_heads": 8}, "blocks", 0.31),
        ({"n_heads": 8, "n_layers": 16}, "blocks", 0.54),
        ({"n_heads": 8, "dropout": 0.1}, "blocks", 0.52),
    ],
)
def test_the_estimate_is_near_the_measured_memory(shape, recompute, measured):
    shape = {"dim": 256, "n_layers": 8, "max_seq_len": 256, "vocab_size": 1024} | shape
    shape["hidden_dim"] = None
    work = workload(
        device=CPU, shape=shape, dtype="float32", batch_size=8, gradient_checkpointing=recompute
    )
    assert estimate(DDP, work).peak / GIB == pytest.approx(measured, rel=0.15)


def test_compiling_recomputing_and_chunks_of_logits_lower_the_estimate():
    def working(**changes) -> int:
        return estimate(DDP, workload(**changes)).working

    assert working(compiled=True) < working()
    channels, tokens = (4 + 2) * 16, 3 * 128  # of queries and keys; 10 bytes each, as in any norm
    more = working(shape={"qk_norm": True}) - working()
    assert more == pytest.approx(2 * tokens * channels * 10, rel=1e-3)
    # A mask of 2 bytes per pair of positions; on a GPU k and v, 2 bytes each, for all four heads
    mask, copies = 2 * tokens * 128, 2 * tokens * 2 * 2 * (4 - 2) * 16
    assert working(masked=True) - working() == mask + copies
    assert working(masked=True, device=CPU) - working(device=CPU) == CPU_KEEPS * mask
    sizes = [working(gradient_checkpointing=how) for how in ("blocks", "selective", "off")]
    assert sizes == sorted(set(sizes))
    many = {"vocab_size": 1 << 17, "n_layers": 1}  # 2**24 logits per sequence
    assert 12 * 2**28 < working(shape=many, batch_size=32) < 1.2 * 12 * 2**28  # 2**28 logits
    on_cpu = working(shape=many, batch_size=16, device=CPU)
    assert on_cpu < 2 * 12 * 2**25  # 2**25 logits at once, 12 bytes each


@pytest.mark.parametrize("engine", ["ddp", "zero3"])
def test_the_largest_batch_fits_and_one_more_sequence_does_not(engine):
    strategy, work = STRATEGIES[engine], workload(processes=2, shape={"max_seq_len": 4096})
    size = largest_batch(strategy, work, OVERHEAD + GIB)
    assert 1 < size < LARGEST_BATCH
    for batch_size in (size, size + 1):
        other = replace(work, args=replace(work.args, batch_size=batch_size))
        assert fits(strategy, other, OVERHEAD + GIB) is (batch_size == size)
    assert largest_batch(strategy, work, OVERHEAD) == 0


def test_gradients_are_reduced_once_per_step_where_whole_gradients_fit():
    strategy, work = STRATEGIES["zero2"], workload(accumulation_steps=3)
    coalesced = replace(strategy, coalesces=True)
    needs = estimate(coalesced, work)
    assert needs.held - estimate(strategy, work).held == 4 * work.shapes.num_parameters()
    enough = int(needs.held + MARGIN * needs.working + OVERHEAD) + 1
    assert can_coalesce(strategy, work, enough)
    assert not can_coalesce(strategy, work, enough - 2)
    assert not any(
        can_coalesce(STRATEGIES[name], work, 2 * enough) for name in ("ddp", "zero1", "zero3")
    )
    for no in ({"accumulation_steps": 1}, {"coalesce_reduction": False}):
        assert not can_coalesce(strategy, replace(work, args=replace(work.args, **no)), enough)
