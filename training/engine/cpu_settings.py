"""Settings that make a CPU fast: all of its cores, and in training memory that is kept.

By default glibc returns every large block to the system when a tensor is freed, and gets zeroed
pages one fault at a time when training makes the same tensor again: a third of the time on a CPU
(docs/performance.md).
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.numbers import available_cores

# Parameters of mallopt(3), from malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
KEPT = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: 256 * 2**20}
GIVEN_BACK = {M_MMAP_MAX: 65536, M_MMAP_THRESHOLD: 2**20, M_TOP_PAD: 0}

_keeps = False  # this process's allocator


def keep_freed_memory() -> bool:
    """Have this process's allocator keep what is freed; return False without glibc."""
    global _keeps
    _keeps = _tell(KEPT)
    return _keeps


@contextmanager
def give_back_freed_memory() -> Iterator[None]:
    """Give freed memory back in here, around code that makes tensors that stay beside larger ones
    that go: the holes between those that stay would be several times as large."""
    kept = _keeps
    if kept:
        _tell(GIVEN_BACK)
        ctypes.CDLL(None).malloc_trim(0)  # what has been kept would be taken first
    try:
        yield
    finally:
        if kept:
            _tell(KEPT)


def _tell(options: dict[int, int]) -> bool:
    """Set options of glibc's allocator; return False on systems with another one."""
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    return all(libc.mallopt(name, value) for name, value in options.items())


def use_all_cores() -> None:
    """Divide this machine's cores among its processes; launchers give each a single one."""
    launched = "LOCAL_WORLD_SIZE" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if "OMP_NUM_THREADS" not in os.environ or (launched and os.environ["OMP_NUM_THREADS"] == "1"):
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, available_cores() // processes))
