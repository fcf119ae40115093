"""Speed, measured: `python -m benchmarks.NAME` prints tables that can go into docs/ as they are."""
