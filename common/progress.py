"""A progress bar for terminals, and a line per minute for log files."""

import sys
from contextlib import suppress

from tqdm import tqdm


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
