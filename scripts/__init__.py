"""Programs to be started as python -m scripts.NAME."""

import os

import common  # noqa: F401  first of all: it makes Ctrl-C end a program in one line

# Before PyTorch is loaded: its threads wait by spinning (GNU OpenMP), which makes writing text ten
# times as slow where something else uses the cores. A thirtieth is as fast on free ones.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
