"""How long run_accelerate.sh trains on a CPU, and how often it validates, writes samples and saves.

    python -m training.cpu_steps --data out/data/NAME [training flags that were typed]

Flags go to stdout, what a small text is given to stderr. Those that are typed stand behind them and
win. (With dropout a text could be read more often, but it takes attention on a CPU off its fast
path: in the same time less is learned than with other ways to cut it, see data/segmentation.py.)
"""

import argparse
import sys

from common.errors import UsageError, one_line_errors
from data.shards import read_description

PASSES = 4  # more of them teach less and less (https://arxiv.org/abs/2305.16264)
TOKENS_PER_STEP = 4096  # of run_accelerate.sh on a CPU
LEAST, MOST = 100, 600  # steps


def suited_steps(tokens: int, segmentations: int) -> int:
    """Of a text with so many tokens: PASSES of it, within bounds; a single one where it already
    stands there several times."""
    passes = PASSES if segmentations == 1 else 1
    return min(MOST, max(LEAST, passes * tokens // TOKENS_PER_STEP))


def intervals(steps: int) -> str:
    """Flags with which a run of so many steps is looked at six times, or every 100 steps."""
    often = min(100, steps, max(20, steps // 6))
    return (
        f"--log_interval {min(20, steps)} --eval_interval {often} --sample_interval {often} "
        f"--save_interval {min(2 * often, steps)}"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--data", "--epochs", "--max_steps"):
        parser.add_argument(name)
    typed, _ = parser.parse_known_args(argv)  # the rest, and nonsense, is judged where it is used
    description = read_description(typed.data)
    tokens = description["splits"]["train"]["tokens"]
    steps = suited_steps(tokens, description.get("prepared_from", {}).get("segmentations", 1))
    if (typed.max_steps or "").isdigit():
        steps = int(typed.max_steps)
    elif (typed.epochs or "").isdigit():
        steps = int(typed.epochs) * tokens // TOKENS_PER_STEP
    if typed.max_steps is None and typed.epochs is None:
        print(f"--max_steps {steps}")
        if steps < MOST:
            said = f"for a text of {tokens:,} tokens: --max_steps {steps}, unless you give another"
            print(said, file=sys.stderr)
    print(intervals(max(1, steps)))


if __name__ == "__main__":
    with one_line_errors("run_accelerate.sh", UsageError):
        main()
