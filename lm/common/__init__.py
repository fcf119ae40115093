"""Code that all programs share: one-line errors, the parser, numbers, atomic files, signals."""

import io
import locale
import sys
from contextlib import suppress

from lm.common.errors import end_in_one_line, end_with_launcher

# Early: Ctrl-C may come, and a launcher may end, while torch is imported.
sys.excepthook = end_in_one_line
end_with_launcher()
if isinstance(sys.stdout, io.TextIOWrapper):  # false in a notebook, or if a shell closed stdout
    # A model may write characters that the terminal's encoding lacks: print them as \u escapes.
    sys.stdout.reconfigure(errors="backslashreplace")
with suppress(locale.Error):  # PyTorch opens its own files, which are UTF-8, as the locale says
    locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
