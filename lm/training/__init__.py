"""The functions and classes that train_*.py use; `lm/engine/` sets up DeepSpeed or DDP."""

import lm.common  # noqa: F401  imported first, so that Ctrl-C prints one line, no traceback
