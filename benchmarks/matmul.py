"""What this machine reaches on matrix products alone: the yardstick where no data sheet is known.

Which size is fastest depends on caches and cores, so the peak is the best of several sizes.
"""

import statistics
import time

import torch

from training.engine.cpu_settings import use_all_cores

REPEATS = 5
# (m, k, n) of an (m, k) by (k, n) product. The second is a feed-forward layer of the 26m model, the
# third its output layer.
SHAPES = ((2048, 2048, 2048), (4096, 512, 1408), (4096, 512, 6400), (4096, 4096, 4096))
GPU_SHAPES = (*SHAPES, (8192, 8192, 8192), (16384, 8192, 1280))


class MatrixProducts:
    """Products in one precision, to be measured again and again."""

    def __init__(self, dtype: torch.dtype):
        use_all_cores()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = self.device.type == "cuda"
        # A GPU is asked for several products at once, to hide the time it takes to ask.
        self._at_once = 10 if on_gpu else 1
        self._operands = {}
        for m, k, n in GPU_SHAPES if on_gpu else SHAPES:
            a = torch.randn(m, k, device=self.device).to(dtype)
            b = torch.randn(k, n, device=self.device).to(dtype)
            # Written into the same memory every time, so that no page faults are measured.
            self._operands[m, k, n] = a, b, torch.empty(m, n, device=self.device, dtype=dtype)

    def peak(self) -> float:
        """Return the FLOP/s of the fastest size."""
        return max(map(self._measure, self._operands))

    def _measure(self, shape: tuple[int, int, int]) -> float:
        """Return the median FLOP/s; a product of (m, k) and (k, n) takes 2·m·k·n."""
        a, b, out = self._operands[shape]
        m, k, n = shape
        torch.mm(a, b, out=out)
        seconds = []
        for _ in range(REPEATS):
            synchronize(self.device)
            start = time.perf_counter()
            for _ in range(self._at_once):
                torch.mm(a, b, out=out)
            synchronize(self.device)
            seconds.append((time.perf_counter() - start) / self._at_once)
        return 2 * m * k * n / statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was asked; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
