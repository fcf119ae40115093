"""Make `python PATH/scripts/generate.py` work like `python -m scripts.generate`.

Python then searches scripts/ for modules and finds this file instead of the real `common`. This
file replaces scripts/ by the folder above in the search path.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
del sys.modules["common"]
import scripts  # noqa: E402, F401  it imports the real `common`
