"""What this process has used so far: memory, and time in which it waited for a core."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory so far: of the GPU's allocator, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes


def seconds_without_core(tasks: Path = Path("/proc/self/task")) -> float:
    """That this process's threads could have run and no core was free; 0 where the system does not
    tell, as Linux does."""
    nanoseconds = 0
    for path in tasks.glob("*/schedstat"):
        with suppress(OSError):  # a thread that has ended meanwhile
            nanoseconds += int(path.read_text("ascii").split()[1])
    return nanoseconds / 1e9
