"""Stand in for `common` where a script is started by its path: `python PATH/scripts/generate.py`.

Python then looks for modules in this folder: make it look in the one above, and for the real one.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
del sys.modules["common"]
import scripts  # noqa: E402, F401  as `python -m scripts.NAME` does first; it imports `common`
