"""Speed, measured: `python -m benchmarks.NAME` prints tables that can go into docs/ as they are."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
