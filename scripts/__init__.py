"""Programs of this project. Start one with python -m scripts.NAME."""

import os

import common  # noqa: F401  first, to handle Ctrl-C during slow imports

# PyTorch's threads (GNU OpenMP) wait by spinning. On busy cores this makes generation ten times
# slower. On free cores, generation is as fast with a thirtieth of the default number of spins.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
