"""Format numbers, tables and progress bars; count processor cores."""

import os
import sys

from tqdm import tqdm

from lm.common.control_groups import group_limits


def available_cores() -> int:
    """Return the number of processor cores that this process may use. A container's quota of 1.5
    cores counts as one: threads that share a core wait for each other."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    limits = group_limits("cpu", ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"])
    quotas = [quota / period for quota, period in limits.values()]
    return max(1, int(min([cores, *quotas])))


def counted(n: int, plural: str) -> str:
    """Return a number with a noun: "1 layer", "2 layers", "1 process", "1,024 processes"."""
    one = plural.removesuffix("es" if plural.endswith("sses") else "s")
    return f"{n:,} {one if n == 1 else plural}"


def size(n_bytes: float) -> str:
    """Return a size in GB, in MB, or (below 0.1 MB) in kB, such as "3.4 GB"."""
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:.1f} GB"
    if n_bytes >= 1e5:
        return f"{n_bytes / 1e6:.1f} MB"
    return f"{n_bytes / 1e3:.1f} kB"


def memory(n_bytes: float) -> str:
    """Return a size in GiB, such as "3.41 GiB", or (below 0.1 GiB) as `size` does: "12.1 MB"."""
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 / 10 else size(n_bytes)


def columns(rows: list[dict[str, str]]) -> str:
    """Return a table. The keys are the titles. All columns except the first are right-aligned."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    form = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    return "\n".join(form.format(*line).rstrip() for line in lines)


def progress_bar(total: int | None, desc: str, unit: str, scale: bool = False, **options) -> tqdm:
    """Return a tqdm bar. If stderr is a file or a pipe, the bar appears once per minute."""
    wait = 0.1 if sys.stderr.isatty() else 60  # seconds
    options |= {"delay": wait, "mininterval": wait, "maxinterval": wait, "dynamic_ncols": True}
    return tqdm(total=total, desc=desc, unit=unit, unit_scale=scale, **options)


def rounded(value: float) -> float:
    """Round to two significant digits."""
    return float(f"{value:.2g}")
