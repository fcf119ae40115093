"""A progress bar for terminals, and its like for log files."""

import sys
from contextlib import suppress

from tqdm import tqdm


def progress_bar(total: int | None, desc: str, unit: str, scale: bool = False, **options) -> tqdm:
    """A tqdm bar. A file or a pipe keeps every drawing: there it comes seldom, on its own line."""
    kind = tqdm
    if not sys.stderr.isatty():
        kind, line = Lines, "{desc} {n_fmt}/{total_fmt}{postfix}, {remaining} left"
        # With any other `miniters`, tqdm's own thread draws once more, 10 seconds after each time.
        options |= {"mininterval": 60, "miniters": 1, "bar_format": line}
    options["delay"] = 0.01  # not before there is something to show
    return kind(total=total, desc=desc, unit=unit, unit_scale=scale, dynamic_ncols=True, **options)


class Lines(tqdm):
    """A line at a time, nothing to draw over, and none at the end: what was done says so itself."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        with suppress(OSError):  # no reader any more, or a full disk, must not end what it counts
            print(self, file=sys.stderr, flush=True)

    def clear(self, nolock: bool = False) -> None:
        pass

    def close(self) -> None:
        self.disable = True
