"""Training time between two reports, and whether other programs slow it down."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from training.engine.usage import seconds_without_core

# Share of its time that a thread waits for a core beside a busy program, at least. Measured on two
# cores: 0.37 beside one, 0.005 alone.
CROWDED = 0.1


@dataclass
class StepClock:
    """Time since its making; a new one is made at each report."""

    steps: int = 0
    tokens: int = 0  # of this process, without padding
    paused: float = 0.0  # seconds
    began: float = field(default_factory=time.perf_counter)
    waited: float = field(default_factory=seconds_without_core)

    @property
    def elapsed(self) -> float:
        """Seconds, with pauses."""
        return time.perf_counter() - self.began

    @property
    def seconds(self) -> float:
        """Seconds of training, without pauses."""
        return self.elapsed - self.paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time in here out of `seconds`."""
        start = time.perf_counter()
        yield
        self.paused += time.perf_counter() - start

    def is_crowded(self) -> bool:
        """Return whether other programs took the cores from this process's threads."""
        threads = torch.get_num_threads()
        waited = seconds_without_core() - self.waited
        return threads > 1 and waited > CROWDED * threads * self.elapsed


def as_time(seconds: float) -> str:
    """Return a duration as h:mm:ss, or m:ss below an hour."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
