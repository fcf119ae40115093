"""Programs of this project. Start one with python -m scripts.NAME."""

import common  # noqa: F401  first, to handle Ctrl-C during slow imports
