"""The processor cores that this process may use."""

import os


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def spin_briefly() -> None:
    """Have the threads of GNU's OpenMP look 3,000 times for work before they sleep, instead of
    300,000; before torch is loaded, and unless the environment says otherwise.

    While they look they keep a core from whoever has work. Alone that costs nothing; beside one
    busy program on two cores training keeps half of its speed or more, instead of a third
    (docs/performance.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
