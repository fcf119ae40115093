from types import SimpleNamespace

import pytest
import torch

from training.engine.device import (
    PEAKS,
    PRECISIONS,
    device_name,
    matrix_precision,
    mfu,
    peak_flops,
)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA RTX A6000", 154.8e12),
        ("NVIDIA RTX 6000 Ada Generation", 364.2e12),
        ("NVIDIA GeForce RTX 5080", 112.6e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA GeForce RTX 3090 Ti", 80e12),
        ("AMD Instinct MI300X", 1307e12),
    ],
)
def test_the_peak_of_a_known_device(name, peak):
    assert peak_flops(name, "bf16") == peak_flops(name, "fp16") == peak


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA H100 80GB HBM3", [989e12, 989e12, 494.5e12, 67e12]),
        ("NVIDIA A100-SXM4-80GB", [312e12, 312e12, 156e12, 19.5e12]),
        ("NVIDIA GeForce RTX 4090", [165.2e12, 165.2e12, 82.6e12, 82.6e12]),
        ("Tesla T4", [None, 65e12, None, 8.1e12]),
        ("Tesla V100-SXM2-16GB", [None, 125e12, None, 15.7e12]),
        ("Tesla V100-PCIE-32GB", [None, 112e12, None, 14e12]),
        ("Tesla V100S-PCIE-32GB", [None, 130e12, None, 16.4e12]),
    ],
)
def test_every_precision_has_a_peak_of_its_own(name, peaks):
    assert [peak_flops(name, precision) for precision in PRECISIONS] == pytest.approx(peaks)


def test_the_table_finds_each_of_its_devices_and_no_peak_grows_with_the_precision():
    for name, peaks in PEAKS.items():
        assert [peak and peak * 1e12 for peak in peaks] == [
            peak_flops(f"NVIDIA {name}", precision) for precision in PRECISIONS
        ]
        known = [peak for peak in peaks if peak is not None]
        assert known == sorted(known, reverse=True)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "name",
    [
        "CPU, 2 threads per process",
        "NVIDIA RTX A4000",
        "Quadro RTX 6000",
        "NVIDIA GeForce RTX 5080 Laptop GPU",  # a smaller chip than the desktop's
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4080 SUPER",  # a larger one
        "NVIDIA GeForce RTX 3080 Ti",
        "NVIDIA GeForce RTX 3090 Ti Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a seventh of the device
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "",
    ],
)
def test_a_device_that_is_not_in_the_table_has_no_peak_and_no_relatives(name, precision):
    assert peak_flops(name, precision) is None


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


def test_mfu_of_an_unknown_device_is_none():
    assert mfu(1e5, 1e9, None, devices=2) is None


@pytest.mark.parametrize(("n", "said"), [(1, "1 thread"), (2, "2 threads")])
def test_a_cpu_is_named_with_its_threads(n, said, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: n)
    assert device_name(torch.device("cpu")) == f"CPU, {said} per process"
