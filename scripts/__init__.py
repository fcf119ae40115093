"""Programs to be started as python -m scripts.NAME."""

import training  # noqa: F401  first of all: it makes Ctrl-C end a program in one line
