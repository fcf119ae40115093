"""What a benchmark ran on: names, versions, free memory."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from common.cpu import available_cores

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "litgpt")


def cpu_name() -> str:
    """The model's name and the cores that this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    return f"{name}, {available_cores()} cores"


def versions() -> dict[str, str]:
    """Of Python and the packages that count; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def compiler_obstacle(has_gpu: bool) -> str | None:
    """Why torch.compile cannot work here, as far as that is known beforehand."""
    if has_gpu:
        return None if find_spec("triton") else "torch.compile needs the package triton"
    compilers = (os.environ.get("CXX"), "g++", "clang++", "c++")
    if any(name and shutil.which(name) for name in compilers):
        return None
    return "torch.compile needs a C++ compiler, and neither g++ nor clang++ is on PATH"
