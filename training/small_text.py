"""How long run_accelerate.sh trains on a CPU where the text is small.

    python -m training.small_text out/data/NAME

The flag goes to stdout, what it is to stderr; flags that are typed stand behind it and win. (With
dropout a text could be read more often, but it takes attention on a CPU off its fast path: in the
same time less is learned.)
"""

import sys

from common.errors import UsageError, one_line_errors
from data.shards import read_description

PASSES = 4  # more of them teach less and less (https://arxiv.org/abs/2305.16264)
TOKENS_PER_STEP = 4096  # of run_accelerate.sh on a CPU
LEAST, MOST = 100, 600  # steps


def suited_flags(tokens: int) -> str:
    """Training flags for so many tokens; none where MOST steps are fewer than PASSES."""
    steps = max(LEAST, PASSES * tokens // TOKENS_PER_STEP)
    return f"--max_steps {steps}" if steps < MOST else ""


def main(packed: str) -> None:
    tokens = read_description(packed)["splits"]["train"]["tokens"]
    if flags := suited_flags(tokens):
        said = f"for a text of {tokens:,} tokens: {flags}, unless you give another"
        print(said, file=sys.stderr)
    print(flags)


if __name__ == "__main__":
    with one_line_errors("run_accelerate.sh", UsageError):
        main(sys.argv[1])
