"""Stand in for `common` where a script is started by its path: `python scripts/generate.py`.

Python then looks for modules in this folder instead of the one above it. A script imports `common`
first: it finds this file, which sets the path right and makes way for the real `common`.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
del sys.modules["common"]
import scripts  # noqa: E402, F401  as `python -m scripts.NAME` does first; it imports `common`
