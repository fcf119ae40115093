"""What a benchmark ran on: names, versions, free memory."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "litgpt")


def cpu_name() -> str:
    """The model's name and the cores that this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    affinity = getattr(os, "sched_getaffinity", None)
    return f"{name}, {len(affinity(0)) if affinity else os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """Of Python and the packages that count; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be taken: of the GPU, or of RAM within a container's limit.

    None where the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":") for line in meminfo.read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in used.read_text().splitlines())
        free = min(free, int(text) - int(stat["anon"]))  # the rest can be reclaimed
    return free


def compiler_obstacle(has_gpu: bool) -> str | None:
    """Why torch.compile cannot work here, as far as that is known beforehand."""
    if has_gpu:
        return None if find_spec("triton") else "torch.compile needs the package triton"
    compilers = (os.environ.get("CXX"), "g++", "clang++", "c++")
    if any(name and shutil.which(name) for name in compilers):
        return None
    return "torch.compile needs a C++ compiler, and neither g++ nor clang++ is on PATH"
