"""Have glibc keep the memory that it was given.

By default it returns every large block to the system when a tensor is freed and asks for it again a
moment later; each time the system hands out zeroed pages one fault at a time. Training frees and
makes the same large tensors at every step, which cost a third of the time on a CPU
(docs/performance.md).
"""

import ctypes
import sys

# Parameters of mallopt(3), from malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Set it for this process; False where the C library is not glibc, and then nothing happens."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: 256 * 2**20}
    return all(libc.mallopt(name, value) for name, value in settings.items())
