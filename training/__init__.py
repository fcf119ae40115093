"""The steps of training, which train_*.py call; `engine/` sets up DeepSpeed or DDP."""

import common  # noqa: F401  imported first, so that Ctrl-C ends a program in one line
