"""The verbs of training, for the pages train_*.py; `engine/` is who trains."""

import common  # noqa: F401  first of all: it makes Ctrl-C end a program in one line
