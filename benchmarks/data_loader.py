"""The training script's loader: alone, from memory and from disk, and inside training steps."""

import contextlib
import ctypes
import io
import math
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.data_padding import padded_batches
from common.errors import UsageError
from data.dataset import PackedDataset
from data.order import MicroBatchSampler
from train_pretrain_accelerate import Run, micro_batches, optimizer_step, set_up
from training.arguments import parse_arguments
from training.interruption import SIGNALS

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
    sampler = MicroBatchSampler(len(train_set), batch_size)
    batches = micro_batches(train_set, sampler, num_workers, torch.device("cpu"))
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

    def __next__(self) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        batch = next(self.batches)
        self.waited += time.perf_counter() - start
        return batch


Steps = list[tuple[float, float]]  # seconds of each step, and how many of them waiting for data


def timed_steps(run: Run, streams: list[Iterator], steps: int) -> list[Steps]:
    """So many optimizer steps on each stream of micro-batches, the streams alternating."""
    times = [[] for _ in streams]
    for _ in range(WARM_UP_STEPS + steps):
        for batches, kept in zip(streams, times, strict=True):
            run.batches, start = Timed(batches), time.perf_counter()
            optimizer_step(run)  # asks for the gradient's norm, and so waits for a GPU
            kept.append((time.perf_counter() - start, run.batches.waited))
    return [kept[WARM_UP_STEPS:] for kept in times]


def training_steps(
    folder: Path, flags: list[str], steps: int, num_workers: list[int], padded: bool
) -> dict[int | str, Steps]:
    """Times of real training steps, in a process of their own.

    Args:
        folder: prepared data.
        flags: of the training script: the model, batch_size and max_seq_len.
        steps: to measure of each kind.
        num_workers: of the loader; each is measured after the other.
        padded: measure packed and padded batches in turn as well.

    Returns:
        By number of workers, and by "packed" and "padded".

    Raises:
        UsageError, DataError, ConfigError: this cannot be trained.
    """
    # Accelerate and the allocator settle things for a whole process; training must find them
    # untouched.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_train, folder, flags, steps, num_workers, padded).result()
        except BrokenProcessPool as error:
            raise UsageError(
                "training was killed, perhaps for want of memory: try a smaller --batch_size"
            ) from error


def _train(
    folder: Path, flags: list[str], steps: int, num_workers: list[int], padded: bool
) -> dict[int | str, Steps]:
    silence = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as out,
        contextlib.redirect_stdout(silence),
        contextlib.redirect_stderr(silence),
    ):
        own = ["--data", str(folder), "--out_dir", out, "--log_with", "none"]
        run = set_up(*parse_arguments([*own, "--max_steps", "1000000", *flags]))
        for number in SIGNALS:  # there is nothing to save: Ctrl-C ends it
            signal.signal(number, signal.SIG_DFL)
        run.model.train()
        times, device = {}, run.accelerator.device
        for count in num_workers:
            batches = micro_batches(run.train_set, run.sampler, count, device)
            (times[count],) = timed_steps(run, [batches], steps)
            batches.close()  # its workers must not disturb the next
        if padded:
            shape = run.config.max_seq_len, run.args.batch_size
            batches = micro_batches(run.train_set, run.sampler, 0, device)
            streams = [batches, padded_batches(folder, *shape, device)]
            times["packed"], times["padded"] = timed_steps(run, streams, steps)
        run.log.close()
    return times
