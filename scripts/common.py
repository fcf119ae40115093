"""Make `python PATH/scripts/generate.py` work like `python -m scripts.generate`.

If a program is started by its path, Python finds this file instead of the real package `common`.
This file replaces scripts/ in sys.path by the repository's folder, which has that package.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
del sys.modules["common"]
import scripts  # noqa: E402, F401  it imports the real `common`
