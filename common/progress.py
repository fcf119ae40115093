"""A progress bar for terminals, and its like for log files."""

import sys

from tqdm import tqdm


def progress_bar(total: int | None, desc: str, unit: str, scale: bool = False, **options) -> tqdm:
    """A tqdm bar. A file or a pipe keeps every drawing: there it comes seldom, on its own line."""
    if not sys.stderr.isatty():
        line = "{desc} {n_fmt}/{total_fmt}{postfix}, {remaining} left\n"
        options |= {"mininterval": 60, "bar_format": line}
    options["delay"] = 0.01  # not before there is something to show
    return tqdm(total=total, desc=desc, unit=unit, unit_scale=scale, dynamic_ncols=True, **options)
