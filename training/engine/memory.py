"""Memory of this process as the system measures it: what it has used, and what it can have."""

import os
import resource
import sys
from pathlib import Path

import torch

GIB = 2**30


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory so far: of the GPU's allocator, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes


def available_memory(device: torch.device, processes: int) -> int | None:
    """Return the bytes that this process can have in all, with those that it has already.

    The processes of a machine share its RAM, within a container's limit. None where the system does
    not say.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":") for line in meminfo.read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in used.read_text().splitlines())
        free = min(free, int(text) - int(stat["anon"]))  # the rest can be reclaimed
    resident, shared = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3])
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return free // sharing + (resident - shared) * resource.getpagesize()
