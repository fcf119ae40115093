import os
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from common.cpu import available_cores
from training.engine.cpu_settings import (
    give_back_freed_memory,
    keep_freed_memory,
    use_all_cores,
)


@pytest.fixture
def environ(monkeypatch) -> dict:
    """An environment that names neither processes nor threads, restored after the test."""
    names = ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "ACCELERATE_MIXED_PRECISION")
    clean = {k: v for k, v in os.environ.items() if k not in names}
    monkeypatch.setattr(os, "environ", clean)
    return clean


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("local_world_size", "cores", "used"), [(1, 6, 6), (2, 6, 3), (4, 6, 1), (8, 6, 1)]
)
def test_the_cores_are_divided_among_the_processes(
    environ, monkeypatch, threads, local_world_size, cores, used
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    environ |= {"LOCAL_WORLD_SIZE": str(local_world_size), "OMP_NUM_THREADS": "1"}
    use_all_cores()
    assert torch.get_num_threads() == used


def test_a_number_of_threads_that_the_user_chose_stays(environ, threads):
    environ["OMP_NUM_THREADS"] = "3"
    use_all_cores()
    assert torch.get_num_threads() == 1  # as it was


def test_without_a_word_of_threads_all_cores_are_used(environ, monkeypatch, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)), raising=False)
    use_all_cores()
    assert torch.get_num_threads() == 5


def test_cores_are_those_that_this_process_may_use_or_all_of_the_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5, 7}, raising=False)
    assert available_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert available_cores() == 12
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores() == 1


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def growth(context) -> float:
    """How much more a process that keeps freed memory has, in units of what stays, when of arrays
    in turn the larger ones have gone."""
    keep_freed_memory()
    before, n = resident(), 2**20
    with context():
        made = [(np.ones(8 * n, np.int8), np.ones(n, np.int8)) for _ in range(16)]
        stay = [small for _, small in made]
        del made
    return (resident() - before) / sum(small.nbytes for small in stay)


def in_a_process_of_its_own(context) -> float:
    """Its allocator's settings stay; a fork would have what tests before it have freed to fill."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(growth, context).result()


@pytest.mark.skipif(sys.platform != "linux", reason="freed memory is kept on Linux alone")
def test_memory_that_goes_between_what_stays_can_be_given_back():
    assert in_a_process_of_its_own(nullcontext) > 6  # all of it would be 9
    assert in_a_process_of_its_own(give_back_freed_memory) < 2
