"""What the GPU can do; and GPUs that are there and cannot be used: said, instead of training on the
CPU in silence."""

import os
import shutil
import subprocess

import torch

from common.errors import UsageError

# The oldest Linux driver of each CUDA version, from NVIDIA's table "CUDA Toolkit and Minimum
# Required Driver Version for CUDA Minor Version Compatibility".
OLDEST_DRIVER = {"11": "450", "12": "525", "13": "580"}
OTHER_PYTORCH = (
    "a PyTorch built for another CUDA (https://pytorch.org/get-started/locally/ has the command)"
)
ON_THE_CPU = "to train on the CPU all the same, put CUDA_VISIBLE_DEVICES= in front"


def has_bf16() -> bool:
    """Whether the GPU computes in bfloat16, as those from Ampere on do."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def has_tf32() -> bool:
    """Whether the GPU has TF32, NVIDIA's way to multiply in fp32 on tensor cores."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability() >= (8, 0)


def require_usable_gpus() -> None:
    """Raises UsageError: a GPU is there, and this PyTorch cannot use it."""
    if torch.version.hip is not None:
        return
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            _require_architecture(index)
        return
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    seen = None if hidden else _ask_driver()
    if seen is None:
        return
    name, driver = seen
    if torch.version.cuda is None:
        raise UsageError(
            f"there is a GPU ({name}), but PyTorch {torch.__version__} was built without CUDA: "
            f"install {OTHER_PYTORCH}; {ON_THE_CPU}"
        )
    oldest = OLDEST_DRIVER.get(torch.version.cuda.split(".")[0], "a newer one")
    raise UsageError(
        f"PyTorch cannot use the GPU ({name}): its driver is {driver}, and PyTorch "
        f"{torch.__version__} with CUDA {torch.version.cuda} needs driver {oldest} or newer: "
        f"update the driver, or install {OTHER_PYTORCH}; {ON_THE_CPU}"
    )


def _ask_driver() -> tuple[str, str] | None:
    """Name and driver version of the first GPU that nvidia-smi sees; None if it sees none."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = next(iter(asked.stdout.splitlines()), "") if asked.returncode == 0 else ""
    name, comma, driver = (part.strip() for part in first.partition(","))
    return (name, driver) if comma else None


def _require_architecture(index: int) -> None:
    """Raises UsageError: this PyTorch has no code for the GPU, and none that could be adapted."""
    major, minor = torch.cuda.get_device_capability(index)
    compiled = torch.cuda.get_arch_list()
    for arch in compiled:
        kind, _, number = arch.rstrip("af").partition("_")
        its_major, its_minor = int(number[:-1]), int(number[-1])
        same = kind == "sm" and its_major == major and its_minor <= minor
        older = kind == "compute" and (its_major, its_minor) <= (major, minor)
        if same or older:
            return
    raise UsageError(
        f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}, and PyTorch "
        f"{torch.__version__} has code for {', '.join(compiled)} only: install {OTHER_PYTORCH}; "
        f"{ON_THE_CPU}"
    )
