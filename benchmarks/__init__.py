"""Benchmarks. `python -m benchmarks.NAME` prints Markdown tables for docs/."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
