"""In the place of `common` where a script is started by its path: `python scripts/generate.py`.

Python then looks for modules in this folder, and not in the one above it, which has the rooms. The
first of them that a script imports is `common`: it is found here, and makes way for its namesake.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
del sys.modules["common"]
import scripts  # noqa: E402, F401  as `python -m scripts.NAME` does first; it imports `common`
