"""What the training loop uses and is not its story: arguments, engines, checkpoints, metrics."""

import sys

from training.errors import end_in_one_line

sys.excepthook = end_in_one_line  # here, for Ctrl-C while torch is still being imported
