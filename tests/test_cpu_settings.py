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

from training.engine.device import give_back_freed_memory, keep_freed_memory, use_all_cores


@pytest.mark.parametrize(
    ("environ", "used"),
    [
        ({}, 6),
        ({"LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}, 6),  # as a launcher says it
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}, 1),
        ({"LOCAL_WORLD_SIZE": "2"}, 3),
        ({"LOCAL_WORLD_SIZE": "8"}, 1),
        ({"OMP_NUM_THREADS": "3"}, None),  # the user's own choice stays
    ],
)
def test_the_cores_are_divided_among_the_processes(monkeypatch, environ, used):
    names = ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "ACCELERATE_MIXED_PRECISION")
    clean = {k: v for k, v in os.environ.items() if k not in names}
    monkeypatch.setattr(os, "environ", clean | environ)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    use_all_cores()
    assert told == ([used] if used else [])


def growth(context) -> float:
    """How much more a process that keeps freed memory has, in units of what stays, when of arrays
    in turn the larger ones have gone."""
    keep_freed_memory()
    n = 2**20

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    with context():
        made = [(np.ones(8 * n, np.int8), np.ones(n, np.int8)) for _ in range(16)]
        stay = [small for _, small in made]
        del made
    return (resident() - before) / sum(small.nbytes for small in stay)


@pytest.mark.skipif(sys.platform != "linux", reason="freed memory is kept on Linux alone")
@pytest.mark.parametrize(
    ("context", "least", "most"), [(nullcontext, 6, 10), (give_back_freed_memory, 0, 2)]
)
def test_memory_that_goes_between_what_stays_can_be_given_back(context, least, most):
    """In a process of its own, whose allocator has nothing that earlier tests have freed."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert least < pool.submit(growth, context).result() < most
