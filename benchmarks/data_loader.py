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
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
from torch import Tensor

from benchmarks.ours import compute_gradient
from common.errors import stop_in_order
from data.dataset import PackedDataset, micro_batches
from data.order import MicroBatchSampler
from training.arguments import parse_arguments
from training.run import Run
from training.start import set_up

WARM_UP_STEPS = 2


@dataclass
class Training:
    """How fast it went."""

    tokens_per_second: float
    waiting: float | None = None  # for data, as a share of the time; None: not measured


def loader_row(
    folder: Path,
    batch_size: int,
    seq_len: int,
    num_workers: int,
    seconds: float,
    training: Training,
) -> dict:
    """The loader's speed alone against training's, and the share of a step that it costs.

    Where that was not measured, it is what it would be if nothing were loaded ahead.
    """
    speed = partial(loader_speed, folder, seq_len, batch_size, num_workers, seconds)
    cold, warm = speed(cold=True), speed(cold=False)
    trained, waiting = training.tokens_per_second, training.waiting
    if waiting is None:
        waiting = trained / (trained + warm)
    return {
        "max_seq_len": seq_len,
        "num_workers": num_workers,
        "loader, tokens/s": f"{warm:,.0f}",
        "the same, shards not in memory": "n/a" if cold is None else f"{cold:,.0f}",
        "training, tokens/s": f"{trained:,.0f}",
        "loader / training": f"{warm / trained:,.0f} ×",
        "waiting for data, share of a step": f"{waiting:.3%}",
    }


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


def timed(batches: Iterator[tuple[Tensor, Tensor]], waits: list[float]) -> Iterator:
    """The same; the seconds for which each was waited go into `waits`."""
    while True:
        start = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - start)
        yield batch


def timed_steps(run: Run, number: int) -> Training:
    """Of the first optimizer steps of a run, after those that warm it up."""
    seconds, waits = [], []
    run.batches = timed(run.batches, waits)
    for step in islice(run.steps(), WARM_UP_STEPS + number):
        if step == WARM_UP_STEPS + 1:
            seconds.clear()
            waits.clear()
        start = time.perf_counter()
        compute_gradient(run, step)
        run.update()
        float(run.grad_norm)  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    tokens = run.samples_per_step * run.train_set.seq_len
    return Training(tokens / median(seconds), waiting=sum(waits) / sum(seconds))


def train_for_a_while(folder: Path, flags: list[str], number: int) -> Training:
    """So many optimizer steps on prepared data, in a process of their own.

    Args:
        flags: of the training script, but for --data.

    Raises:
        UsageError, DataError, ConfigError: this cannot be trained.
    """
    # Accelerate and the allocator settle things for a whole process; training must find them
    # untouched.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_train, [*flags, "--data", str(folder)], number).result()


def _train(flags: list[str], number: int) -> Training:
    # What the run says must not come between the tables.
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(sys.stderr):
        # So many steps that --compile auto finds compiling worth its time.
        own = ["--out_dir", out, "--log_with", "none", "--max_steps", "1000000"]
        run = set_up(*parse_arguments([*own, *flags]))
        stop_in_order()  # a run only notes a signal, to save; there is nothing to save
        training = timed_steps(run, number)
        run.log.close()
    return training
