"""The device: its name, its precisions, and its peak, against which MFU (model FLOPs utilisation)
is measured."""

import os
import shutil
import subprocess

import torch

from common.errors import UsageError
from common.numbers import counted

# TFLOP/s of dense matrix products that are summed in fp32, from the makers' data sheets: in bf16,
# fp16, TF32 and fp32. First match wins: longer names first.
PEAKS = {
    "GB200": (2500, 2500, 1250, 80),
    "B300": (2250, 2250, 1125, 75),
    "B200": (2250, 2250, 1125, 75),
    "GH200": (989, 989, 494.5, 67),
    "H200": (989, 989, 494.5, 67),
    "H100 PCIe": (756, 756, 378, 51),
    "H100 NVL": (835, 835, 417.5, 60),
    "H100": (989, 989, 494.5, 67),
    "H800 PCIe": (756, 756, 378, 51),
    "H800": (989, 989, 494.5, 67),
    "H20": (148, 148, 74, 44),
    "A100": (312, 312, 156, 19.5),
    "A800": (312, 312, 156, 19.5),
    "A40": (149.7, 149.7, 74.8, 37.4),
    "A10G": (70, 70, 35, 35),
    "A10": (125, 125, 62.5, 31.2),
    "L40S": (362, 362, 183, 91.6),
    "L40": (181, 181, 90.5, 90.5),
    "L4": (121, 121, 60, 30.3),
    "T4": (None, 65, None, 8.1),
    "V100 SXM2": (None, 125, None, 15.7),
    "RTX 6000 Ada": (364.2, 364.2, 182.1, 91.1),
    "RTX A6000": (154.8, 154.8, 77.4, 38.7),
    "RTX 5090": (209.5, 209.5, 104.8, 104.8),
    "RTX 5080": (112.6, 112.6, 56.3, 56.3),
    "RTX 4090": (165.2, 165.2, 82.6, 82.6),
    "RTX 4080": (97.5, 97.5, 48.7, 48.7),
    "RTX 3090 Ti": (80, 80, 40, 40),
    "RTX 3090": (71, 71, 35.6, 35.6),
    "MI300X": (1307, 1307, 653.7, 163.4),
}
PRECISIONS = ("bf16", "fp16", "tf32", "fp32")  # the columns
# Parts of names that mean another device: laptop chips, chips cut down or not, MIG slices.
RELATIVES = ("Laptop", "D", "Ti", "SUPER", "MIG")


def require_usable_gpu() -> None:
    """Raise UsageError if there is a GPU that this PyTorch cannot use, or would leave unused."""
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
        try:
            torch.ones(1, device=f"cuda:{index}").sum().item()
            return
        except RuntimeError as error:
            name, why = torch.cuda.get_device_name(index), str(error).splitlines()[0]
    else:
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not shutil.which("nvidia-smi"):
            return
        asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        if asked.returncode or not asked.stdout:
            return
        name, why = asked.stdout.splitlines()[0], f"it is built for CUDA {torch.version.cuda}"
    raise UsageError(
        f"PyTorch {torch.__version__} cannot use {name} ({why}): update the driver, or install "
        "another PyTorch; CUDA_VISIBLE_DEVICES= in front trains on the CPU"
    )


def has_bf16() -> bool:
    """Return whether the GPU computes in bfloat16, as those from Ampere on do."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def has_tf32() -> bool:
    """Return whether the GPU has TF32, NVIDIA's way to multiply in fp32 on tensor cores."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability() >= (8, 0)


def matrix_precision(mixed_precision: str) -> str:
    """Return in which of PRECISIONS this process computes matrix products.

    Args:
        mixed_precision: Accelerate's: "bf16", "fp16", or "no" for float32.
    """
    if mixed_precision != "no":
        return mixed_precision
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {counted(torch.get_num_threads(), 'threads')} per process"


def peak_flops(name: str, precision: str) -> float | None:
    """Return the peak in FLOP/s of a device in one of PRECISIONS, None where it is unknown."""
    words = f" {name} ".replace("-", " ")
    for key, peaks in PEAKS.items():
        before, found, after = words.partition(f" {key} ")
        if found:
            others = set(f"{before} {after}".split())
            peak = None if others.intersection(RELATIVES) else peaks[PRECISIONS.index(precision)]
            return peak and peak * 1e12
    return None


def mfu(
    tokens_per_second: float, flops_per_token: float, peak: float | None, devices: int
) -> float | None:
    """Return the share of the devices' peak that model FLOPs use, None if it is unknown."""
    return None if peak is None else tokens_per_second * flops_per_token / (peak * devices)
