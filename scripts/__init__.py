"""Programs to be started as python -m scripts.NAME."""

import os

import common  # noqa: F401  first of all: it makes Ctrl-C end a program in one line

# Before PyTorch is loaded: between operations its threads wait by spinning (GNU OpenMP, on Linux).
# Where something else uses the cores too, writing text then takes ten times as long. A thirtieth of
# the spinning is as fast on free cores (docs/lab-log.md).
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
