import pytest
import torch

from training.engine.device import device_name, mfu, peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("AMD Instinct MI300X", 1307e12),
    ],
)
def test_the_peak_of_a_known_device(name, peak):
    assert peak_flops(name) == peak


@pytest.mark.parametrize(
    "name",
    [
        "CPU, 2 threads per process",
        "Tesla V100-SXM2-16GB",
        "NVIDIA RTX A4000",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA GH200 480GB",
        "",
    ],
)
def test_a_device_that_is_not_in_the_table_has_no_peak(name):
    assert peak_flops(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",  # a smaller chip than the desktop's
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a seventh of the device
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    ],
)
def test_a_smaller_relative_does_not_get_the_peak_of_the_whole_device(name):
    assert peak_flops(name) is None


def test_mfu_by_hand():
    assert mfu(1e5, 1e9, 1e15, devices=1) == pytest.approx(0.1)
    assert mfu(1e5, 1e9, 1e15, devices=4) == pytest.approx(0.025)


def test_mfu_of_an_unknown_device_is_none():
    assert mfu(1e5, 1e9, None, devices=2) is None


def test_a_cpu_is_named_with_its_threads():
    assert device_name(torch.device("cpu")) == f"CPU, {torch.get_num_threads()} threads per process"
