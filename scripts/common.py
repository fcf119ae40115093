"""Make `python PATH/scripts/generate.py` work like `python -m scripts.generate`.

If a program is started by its path, Python finds this file instead of the real package `common`.
In the search path for modules, this file replaces scripts/ by its parent folder.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
del sys.modules["common"]
import scripts  # noqa: E402, F401  it imports the real `common`
