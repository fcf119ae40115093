"""Speed, measured: `python -m benchmarks.NAME` prints tables that can go into docs/ as they are."""

import signal
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def stop_in_order() -> None:
    """Have SIGTERM and SIGINT run every `finally`, where a program ends what it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # What a shell starts in the background ignores SIGINT unless told otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)
