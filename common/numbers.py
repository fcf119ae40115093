"""Format numbers, tables and progress bars; count processor cores."""

import os
import sys
from contextlib import suppress

from tqdm import tqdm


def available_cores() -> int:
    """Return the number of processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


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
    """Return a tqdm bar. If stderr is a file or a pipe, print one line per minute instead."""
    options["delay"] = 0.01  # do not draw an empty bar
    kind = tqdm
    if not sys.stderr.isatty():
        kind = Lines
        options["bar_format"] = "{desc} {n_fmt}/{total_fmt}{postfix}, {remaining} left"
        # With another value of miniters, tqdm's own thread would draw again 10 seconds later.
        options |= {"mininterval": 60, "miniters": 1}
    return kind(total=total, desc=desc, unit=unit, unit_scale=scale, dynamic_ncols=True, **options)


class Lines(tqdm):
    """A progress bar that prints one line per update, and no line at its end."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        with suppress(OSError):  # a full disk or a closed pipe must not stop the program
            print(self, file=sys.stderr, flush=True)

    def clear(self, nolock: bool = False) -> None:
        pass

    def close(self) -> None:
        self.disable = True
