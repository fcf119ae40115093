"""Programs of this project. Start one with python -m scripts.NAME."""

import os

import lm.common  # noqa: F401  first, to handle Ctrl-C during slow imports

# By default PyTorch's threads (GNU OpenMP) spin 300,000 times before they sleep. On busy cores this
# makes generation ten times slower. On free cores, 10,000 spins are as fast (docs/lab-log.md).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
