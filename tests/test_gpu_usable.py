"""GPUs that PyTorch cannot use, as this machine has none: played by fakes."""

import subprocess

import pytest
import torch
from training.engine.gpu import require_usable_gpus

from common.errors import UsageError
from training.engine import gpu

CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.fixture
def machine(monkeypatch):
    """Makes one with these GPUs and this PyTorch."""

    def make(
        smi: str | None, *, cuda: str | None = "13.0", capabilities=(), archs=CUDA_13, code: int = 0
    ) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU number {i}")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: archs)
        monkeypatch.setattr(gpu.shutil, "which", lambda name: None if smi is None else name)
        ended = subprocess.CompletedProcess([], code, stdout=smi or "")
        monkeypatch.setattr(gpu.subprocess, "run", lambda *args, **kwargs: ended)

    return make


def refused() -> str:
    with pytest.raises(UsageError) as error:
        require_usable_gpus()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_driver_that_is_too_old_is_named_with_what_is_needed(machine):
    machine("NVIDIA GeForce RTX 3090, 535.183.01\nNVIDIA GeForce RTX 3090, 535.183.01\n")
    line = refused()
    for part in (
        "RTX 3090",
        "535.183.01",
        "CUDA 13.0",
        "needs driver 580",
        "CUDA_VISIBLE_DEVICES=",
    ):
        assert part in line


def test_a_pytorch_without_cuda_beside_a_gpu_is_said(machine):
    machine("NVIDIA A100, 580.65\n", cuda=None)
    assert "was built without CUDA" in refused()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_somebody_hides_are_nothing_to_complain_of(machine, monkeypatch, hidden):
    machine("NVIDIA A100, 535.1\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert require_usable_gpus() is None


@pytest.mark.parametrize(("smi", "code"), [(None, 0), ("", 0), ("No devices were found\n", 6)])
def test_no_gpu_is_no_obstacle(machine, smi, code):
    machine(smi, code=code)
    assert require_usable_gpus() is None


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (12, 0), (12, 1), (13, 0)])
def test_gpus_that_this_pytorch_has_code_for(machine, capability):
    """Of the same generation, or of a later one by the intermediate code of the newest."""
    machine(None, capabilities=[(8, 0), capability])
    assert require_usable_gpus() is None


def test_a_gpu_that_this_pytorch_has_no_code_for_is_named(machine):
    machine(None, capabilities=[(8, 0), (7, 0)])
    line = refused()
    assert "GPU number 1 has compute capability 7.0" in line
    assert "sm_75" in line
    machine(None, capabilities=[(8, 0)], archs=["sm_86", "sm_90a"])
    assert "compute capability 8.0" in refused()
