"""Code that every program shares: errors in one line, the parser, numbers, whole files."""

import sys

from common.errors import end_in_one_line

sys.excepthook = end_in_one_line  # here, for Ctrl-C while torch is still being imported
