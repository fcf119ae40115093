"""Matrix products alone: the yardstick of a machine whose data sheet is not known."""

import statistics
import time

import torch

from training.engine.cpu_settings import use_all_cores

REPEATS = 5
# (m, k, n) of an (m, k) by (k, n) product; which is fastest depends on caches and cores. The second
# is a feed-forward layer of the 26m model, the third its output layer.
SHAPES = ((2048, 2048, 2048), (4096, 512, 1408), (4096, 512, 6400), (4096, 4096, 4096))


def matrix_flops(dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest shape, each by the median of its repeats."""
    use_all_cores()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for m, k, n in SHAPES:
        a = torch.randn(m, k, device=device).to(dtype)
        b = torch.randn(k, n, device=device).to(dtype)
        # Written into the same memory every time, so that no page faults are measured.
        out = torch.empty(m, n, device=device, dtype=dtype)
        torch.mm(a, b, out=out)
        seconds = []
        for _ in range(REPEATS):
            synchronize(device)
            start = time.perf_counter()
            torch.mm(a, b, out=out)
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        found.append(2 * m * k * n / statistics.median(seconds))
    return max(found)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was asked; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
