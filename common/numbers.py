"""Numbers in words for people, tables, progress bars, and the number of processor cores."""

import os
import sys
from contextlib import suppress

from tqdm import tqdm


def available_cores() -> int:
    """Return the number of processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def counted(n: int, plural: str) -> str:
    """Count things: 1 layer, 2 layers, 1 process, 1,024 processes."""
    one = plural.removesuffix("es" if plural.endswith("sses") else "s")
    return f"{n:,} {one if n == 1 else plural}"


def size(n_bytes: float) -> str:
    """Write a size: 3.4 GB, 12.1 MB, and kB below 0.1 MB."""
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:.1f} GB"
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e5 else f"{n_bytes / 1e3:.1f} kB"


def columns(rows: list[dict[str, str]]) -> str:
    """Lay out rows of cells by column titles; all but the first column are right-aligned."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{'>' if at else '<'}{width}}}" for at, width in enumerate(widths))
    return "\n".join(form.format(*line).rstrip() for line in lines)


def progress_bar(total: int | None, desc: str, unit: str, scale: bool = False, **options) -> tqdm:
    """Make a tqdm bar; in a file or a pipe, a line per minute."""
    kind = tqdm
    if not sys.stderr.isatty():
        kind, line = Lines, "{desc} {n_fmt}/{total_fmt}{postfix}, {remaining} left"
        # With any other `miniters`, tqdm's own thread draws once more, 10 seconds after each time.
        options |= {"mininterval": 60, "miniters": 1, "bar_format": line}
    options["delay"] = 0.01  # first drawn when there is something to show
    return kind(total=total, desc=desc, unit=unit, unit_scale=scale, dynamic_ncols=True, **options)


class Lines(tqdm):
    """A bar that prints whole lines, and none at its end."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        with suppress(OSError):  # a reader that has gone or a full disk must not end the work
            print(self, file=sys.stderr, flush=True)

    def clear(self, nolock: bool = False) -> None:
        pass

    def close(self) -> None:
        self.disable = True
