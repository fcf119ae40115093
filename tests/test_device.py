import subprocess
from types import SimpleNamespace

import pytest
import torch

from common.errors import UsageError
from training.engine import device
from training.engine.device import (
    PRECISIONS,
    matrix_precision,
    mfu,
    peak_flops,
    require_usable_gpu,
)


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA H100 80GB HBM3", [989e12, 989e12, 494.5e12, 67e12]),
        ("NVIDIA H100 PCIe", [756e12, 756e12, 378e12, 51e12]),
        ("NVIDIA A100-SXM4-80GB", [312e12, 312e12, 156e12, 19.5e12]),
        ("NVIDIA GeForce RTX 3090 Ti", [80e12, 80e12, 40e12, 40e12]),
        ("Tesla V100-SXM2-16GB", [None, 125e12, None, 15.7e12]),
    ],
)
def test_every_precision_has_a_peak_of_its_own(name, peaks):
    assert [peak_flops(name, precision) for precision in PRECISIONS] == pytest.approx(peaks)


@pytest.mark.parametrize(
    "name",
    [
        "CPU, 2 threads per process",
        "NVIDIA GeForce RTX 5080 Laptop GPU",  # a smaller chip than the desktop's
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a seventh of the device
    ],
)
def test_a_device_that_is_not_in_the_table_has_no_peak_and_no_relatives(name):
    assert peak_flops(name, "bf16") is None


@pytest.mark.parametrize(
    ("mixed_precision", "tf32", "precision"),
    [("no", False, "fp32"), ("no", True, "tf32"), ("bf16", False, "bf16"), ("fp16", True, "fp16")],
)
def test_the_precision_of_matrix_products(monkeypatch, mixed_precision, tf32, precision):
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=tf32))
    assert matrix_precision(mixed_precision) == precision


def test_mfu_by_hand():
    assert mfu(1e5, 1e9, 1e15, devices=1) == pytest.approx(0.1)
    assert mfu(1e5, 1e9, 1e15, devices=4) == pytest.approx(0.025)
    assert mfu(1e5, 1e9, None, devices=2) is None


@pytest.mark.parametrize(
    ("text", "code", "hidden"),
    [("GPU 0: NVIDIA A100\nGPU 1", 0, None), ("GPU 0", 0, "-1"), ("No devices\n", 6, None)],
)
def test_a_gpu_that_pytorch_cannot_use_is_named(monkeypatch, text, code, hidden):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device.shutil, "which", lambda name: name)
    ended = subprocess.CompletedProcess([], code, stdout=text)
    monkeypatch.setattr(device.subprocess, "run", lambda *_, **__: ended)
    if code or hidden:
        require_usable_gpu()
        return
    with pytest.raises(UsageError, match=r"cannot use GPU 0: NVIDIA A100 .*CUDA_VISIBLE_DEVICES="):
        require_usable_gpu()


def test_a_gpu_on_which_nothing_can_be_computed_is_named(monkeypatch):
    def fail(*_, **where):
        assert where == {"device": "cuda:1"}
        raise RuntimeError("CUDA error: no kernel image is available\nand more")

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU number {index}")
    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(UsageError, match=r"GPU number 1.*\(CUDA error: no kernel image is avail"):
        require_usable_gpu()
