"""The training script's loader: alone, from memory and from disk, and inside training steps."""

import contextlib
import ctypes
import math
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor

from benchmarks import stop_in_order
from benchmarks.ours import compute_gradient
from data.dataset import PackedDataset
from data.loader import micro_batches
from data.order import MicroBatchSampler
from train_pretrain_accelerate import set_up
from training.arguments import parse_arguments
from training.run import Run

WARM_UP_STEPS = 2


def loader_speed(
    folder: Path, seq_len: int, batch_size: int, num_workers: int, seconds: float, cold: bool
) -> float | None:
    """Tokens/s of the training script's own loader with nothing else to do.

    The clock starts with the first batch, when the workers run. Warm, it goes on for so many
    seconds; cold, for one epoch if that is shorter, over shards that are not in memory; None where
    they cannot be got out of it.
    """
    if cold and not drop_page_cache(folder):
        return None
    train_set = PackedDataset(folder, "train", seq_len)
    batches = micro_batches(train_set, MicroBatchSampler(len(train_set), batch_size), num_workers)
    most = max(1, len(train_set) // batch_size - 1) if cold else math.inf
    next(batches)
    count, start = 0, time.perf_counter()
    while count == 0 or (count < most and time.perf_counter() - start < seconds):
        next(batches)
        count += 1
    return count * batch_size * seq_len / (time.perf_counter() - start)


def drop_page_cache(folder: Path) -> bool:
    """Have the system forget the shards; False if it keeps more than 1% of them (a tmpfs does)."""
    if not hasattr(os, "posix_fadvise"):
        return False
    kept = total = 0
    for path in folder.glob("train-*.bin"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        pages_in_memory = resident_pages(path)
        kept, total = kept + int(pages_in_memory.sum()), total + len(pages_in_memory)
    return kept <= 0.01 * total


def resident_pages(path: Path) -> np.ndarray:
    """Which pages of a file are in the page cache, a bool each, by mincore(2).

    Raises:
        OSError: the system does not say.
    """
    content = np.memmap(path, np.uint8, mode="r")
    flags = np.zeros(-(-len(content) // resource.getpagesize()), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    where, length = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(len(content))
    if libc.mincore(where, length, ctypes.c_void_p(flags.ctypes.data)):
        raise OSError(ctypes.get_errno(), "mincore")
    return flags & 1 == 1


class Timed:
    """An iterator that adds up the seconds for which it is waited."""

    def __init__(self, batches: Iterator[tuple[Tensor, Tensor]]):
        self.batches, self.waited = batches, 0.0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        batch = next(self.batches)
        self.waited += time.perf_counter() - start
        return batch


Steps = list[tuple[float, float]]  # seconds of each step, and how many of them waiting for data


def timed_steps(run: Run, number: int) -> Steps:
    """The first optimizer steps of a run after those that warm it up."""
    times, run.batches = [], Timed(run.batches)
    for step in islice(run.steps(), WARM_UP_STEPS + number):
        start, run.batches.waited = time.perf_counter(), 0.0
        compute_gradient(run, step)
        run.update()  # asks for the gradient's norm, and so waits for a GPU
        times.append((time.perf_counter() - start, run.batches.waited))
    return times[WARM_UP_STEPS:]


def training_steps(folder: Path, flags: list[str], number: int) -> Steps:
    """Times of real training steps on prepared data, in a process of their own.

    Args:
        flags: of the training script, but for --data.

    Raises:
        UsageError, DataError, ConfigError: this cannot be trained.
    """
    # Accelerate and the allocator settle things for a whole process; training must find them
    # untouched.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_train, [*flags, "--data", str(folder)], number).result()


def _train(flags: list[str], number: int) -> Steps:
    # What the run says must not come between the tables.
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(sys.stderr):
        # So many steps that --compile auto finds compiling worth its time.
        own = ["--out_dir", out, "--log_with", "none", "--max_steps", "1000000"]
        run = set_up(*parse_arguments([*own, *flags]))
        stop_in_order()  # a run only notes a signal, to save; there is nothing to save
        times = timed_steps(run, number)
        run.log.close()
    return times
