import ctypes
import os
import platform
from itertools import chain, repeat
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from conftest import error_of
from torch.nn.attention import SDPBackend

from lm.engine import hardware
from lm.engine.hardware import (
    GIB,
    KEEP_FREED,
    KERNELS,
    PRECISIONS,
    attention_kernel,
    available_memory,
    default_dtype,
    keep_freed_memory,
    peak_flops,
    peak_memory_bytes,
    require_usable_gpu,
    set_threads,
)
from model import LMConfig

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
CPU, GPU = torch.device("cpu"), torch.device("meta")  # attention_kernel treats meta as a GPU
CONFIG = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 32}


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA H100 80GB HBM3", [989e12, 989e12, 494.5e12, 67e12]),
        ("NVIDIA H100 PCIe", [756e12, 756e12, 378e12, 51e12]),
        ("NVIDIA GeForce RTX 3090 Ti", [80e12, 80e12, 40e12, 40e12]),
        ("Tesla V100-SXM2-16GB", [None, 125e12, None, 15.7e12]),
        ("CPU, 2 threads per process", [None] * 4),
        ("NVIDIA GeForce RTX 5080 Laptop GPU", [None] * 4),  # a smaller chip than the desktop's
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", [None] * 4),  # a seventh of the device
    ],
)
def test_peaks_are_those_of_the_data_sheet_and_unknown_devices_have_none(name, peaks):
    assert [peak_flops(name, precision) for precision in PRECISIONS] == pytest.approx(peaks)


def test_text_is_generated_in_fp32_on_a_cpu_and_in_the_16_bit_type_of_a_gpu(monkeypatch):
    assert default_dtype("cpu") == "float32"
    for found, dtype in ((True, "bfloat16"), (False, "float16")):
        monkeypatch.setattr(hardware, "has_bf16", lambda found=found: found)
        assert default_dtype("cuda") == dtype


@pytest.mark.parametrize(("bf16", "fp32", "emulates"), [(3, 2, True), (1, 2, False)])
def test_a_cpu_emulates_bf16_if_its_best_bf16_product_is_slower(monkeypatch, bf16, fp32, emulates):
    times = chain([bf16, 99, 9, fp32], repeat(9))  # the two types take turns
    monkeypatch.setattr(hardware.timeit, "timeit", lambda *_, **n: next(times))
    assert hardware.cpu_emulates_bf16() is emulates


def test_a_gpu_that_pytorch_cannot_use_is_named(monkeypatch):
    monkeypatch.setattr(hardware.shutil, "which", lambda name: name)
    listed = SimpleNamespace(stdout="GPU 0: NVIDIA A100\nGPU 1")
    monkeypatch.setattr(hardware.subprocess, "run", lambda *_, **__: listed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    require_usable_gpu()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    line = error_of(require_usable_gpu)
    assert "cannot use GPU 0: NVIDIA A100 (" in line
    assert line.endswith("train on the CPU with CUDA_VISIBLE_DEVICES= before the command")
    listed.stdout = "No devices\n"
    require_usable_gpu()


def test_a_gpu_on_which_nothing_can_be_computed_is_named(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU number {index}")
    error = RuntimeError("CUDA error: no kernel image is available\nand more")
    monkeypatch.setattr(torch, "ones", Mock(side_effect=error))
    said = "cannot use GPU number 1 (CUDA error: no kernel image is available)"
    assert said in error_of(require_usable_gpu)
    assert torch.ones.call_args.kwargs == {"device": "cuda:1"}


def test_attention_on_a_cpu_is_plain_or_blocks_of_rows():
    for changes, said in (
        ({"use_flash_attn": False}, "plain: all T × T scores (--use_flash_attn"),
        ({"dropout": 0.1}, "plain: all T × T scores (the fast path on a CPU has no dropout)"),
        ({}, "blocks of rows"),
    ):
        kernel = attention_kernel(LMConfig(**CONFIG | changes), torch.float32, CPU)
        assert kernel.startswith(said)


def test_the_attention_kernel_is_looked_up_for_the_tensors_of_training(monkeypatch):
    given = {}

    def choice(q, k, v, **options):
        given[q.dtype] = (q.shape, k.shape, v.shape, q.requires_grad, options)
        return int(SDPBackend.MATH.value if q.dtype == torch.float32 else 1)

    assert attention_kernel(LMConfig(**CONFIG), torch.float32, GPU)  # PyTorch accepts the call
    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    flash, all_scores = (
        attention_kernel(LMConfig(**CONFIG), dtype, GPU) for dtype in (torch.bfloat16, torch.float)
    )
    assert flash == "flash attention"
    assert all_scores == KERNELS[0]
    wide, narrow = (1, 4, 32, 16), (1, 2, 32, 16)
    causal = {"dropout_p": 0.0, "is_causal": True}
    assert given[torch.bfloat16] == (wide, narrow, narrow, True, causal | {"enable_gqa": True})
    assert given[torch.float32] == (wide, wide, wide, True, causal | {"enable_gqa": False})


def test_available_and_peak_memory_are_plausible_and_glibc_can_keep_freed_memory():
    alone, shared = available_memory(CPU, 1), available_memory(CPU, 2)
    assert 0 < shared < alone < 2**14 * GIB
    assert peak_memory_bytes(CPU) > 50e6
    keep_freed_memory()
    if platform.libc_ver()[0] == "glibc":  # it accepts the settings
        assert all(ctypes.CDLL(None).mallopt(*each) for each in KEEP_FREED.items())


@pytest.mark.parametrize(
    ("environ", "typed", "used"),
    [
        ({}, {}, 6),
        ({"TORCHELASTIC_RUN_ID": "x", **ONE_THREAD}, {}, 6),  # a launcher set OMP_NUM_THREADS
        ({"ACCELERATE_MIXED_PRECISION": "no", **ONE_THREAD}, {}, 6),
        ({"LOCAL_WORLD_SIZE": "2"}, {}, 3),
        ({"LOCAL_WORLD_SIZE": "8"}, {}, 1),
        ({"OMP_NUM_THREADS": "3"}, {}, None),  # the user's choice
        ({"TORCHELASTIC_RUN_ID": "x", **ONE_THREAD}, ONE_THREAD, None),
        ({"LOCAL_WORLD_SIZE": "1", **ONE_THREAD}, {}, None),  # --deepspeed without a launcher
    ],
)
def test_processes_divide_the_cores_unless_the_user_sets_threads(monkeypatch, environ, typed, used):
    """`typed` is the environment in which the user started the launcher."""
    monkeypatch.setattr(psutil.Process, "environ", lambda process: typed)
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    set_threads()
    assert threads == ([used] if used else [])
    set_threads(5)  # --threads decides over everything
    assert threads[-1] == 5
