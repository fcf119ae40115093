"""The memory that this process has used so far."""

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory so far: of the GPU's allocator, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes
