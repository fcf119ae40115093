"""Code that all programs share: one-line errors, the parser, numbers, atomic files."""

import sys

from common.errors import end_in_one_line

sys.excepthook = end_in_one_line  # early: Ctrl-C may come while torch is imported
