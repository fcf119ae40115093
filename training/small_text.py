"""What run_accelerate.sh's training on a CPU takes besides, where a text is so small that it is
read again and again, and learned by heart.

    python -m training.small_text out/data/NAME

The flags go to stdout, what they are to stderr; flags that are typed stand behind them and win.
"""

import math
import sys
from typing import NamedTuple

from common.errors import UsageError, one_line_errors
from data.shards import read_description


class Recipe(NamedTuple):
    """For less than `below` tokens of training text."""

    below: float
    flags: str


BY_TOKENS = (
    Recipe(100e3, "--max_steps 200 --dropout 0.2"),
    Recipe(200e3, "--max_steps 400 --dropout 0.2"),
    Recipe(1e6, "--dropout 0.1"),
    Recipe(math.inf, ""),
)


def suited_flags(tokens: int) -> str:
    """Training flags for so many tokens; none where 600 steps of 4,096 hardly repeat anything."""
    return next(recipe.flags for recipe in BY_TOKENS if tokens < recipe.below)


def main(packed: str) -> None:
    tokens = read_description(packed)["splits"]["train"]["tokens"]
    if flags := suited_flags(tokens):
        said = f"for a text of {tokens:,} tokens: {flags} (flags of your own win)"
        print(said, file=sys.stderr)
    print(flags)


if __name__ == "__main__":
    with one_line_errors("run_accelerate.sh", UsageError):
        main(sys.argv[1])
