"""How long run_accelerate.sh trains on a CPU, by which optimizer, and how often it validates,
writes samples and saves.

    python -m training.cpu_steps --config_file FILE --data out/data/NAME [flags that were typed]
    python -m training.cpu_steps --config_file FILE --teacher RUN [flags that were typed]

Flags go to stdout, what a small text is given to stderr. Those that are typed stand behind them and
win. (With dropout a text could be read more often, but it takes attention on a CPU off its fast
path: in the same time less is learned than with other ways to cut it, see data/segmentation.py.)
"""

import argparse
import json
import sys
from pathlib import Path

import yaml

from common.errors import UsageError, one_line_errors
from common.parser import UnlessGiven
from data.shards import read_description
from runs.find import DISTILLATION, RUNS, data_of, run_to_resume

PASSES = 4  # more of them teach less and less (https://arxiv.org/abs/2305.16264)
TOKENS_PER_STEP = 4096  # of run_accelerate.sh on a CPU
LEAST, MOST = 100, 600  # steps
MOST_TAUGHT = 180  # with a teacher, that reads along
# Its validation loss ends at 0.6 below that of AdamW. The rate falls straight from its peak to 0.
MUON = (
    "--optimizer muon --muon_learning_rate 0.02 --learning_rate 1e-2 --lr_schedule wsd "
    "--decay_fraction 1 --min_lr_ratio 0"
)
ADAMW = "--optimizer adamw --learning_rate 3e-3"


def suited_steps(tokens: int, segmentations: int, most: int = MOST) -> int:
    """Of a text with so many tokens: PASSES of it, within bounds; a single one where it already
    stands there several times."""
    passes = PASSES if segmentations == 1 else 1
    return min(most, max(LEAST, passes * tokens // TOKENS_PER_STEP))


def intervals(steps: int) -> str:
    """Flags with which a run of so many steps is looked at six times, or every 100 steps."""
    often = min(100, steps, max(20, steps // 6))
    return (
        f"--log_interval {min(20, steps)} --eval_interval {often} --sample_interval {often} "
        f"--save_interval {min(2 * often, steps)}"
    )


def optimizer(config_file: str | None, deepspeed: str | None) -> str:
    """Flags of the one for the engine of these files: Muon, unless matrices are divided or
    offloaded there. A file that cannot be read is judged where it is used."""
    try:
        section = {"deepspeed_config_file": deepspeed}
        if not deepspeed:
            launcher = yaml.safe_load(Path(config_file).read_text(encoding="utf-8"))
            section = launcher["deepspeed_config"]
        zero = {  # the launcher's own fields
            "stage": section.get("zero_stage"),
            "offload_optimizer": {"device": section.get("offload_optimizer_device")},
        }
        if path := section.get("deepspeed_config_file"):
            zero = json.loads(Path(path).read_text(encoding="utf-8"))["zero_optimization"]
        device = (zero.get("offload_optimizer") or {}).get("device")
        offloads = device not in (None, "none") or zero.get("cpu_offload")
        return ADAMW if zero["stage"] == 3 or offloads else MUON
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return MUON


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named = ("config_file", "data", "teacher", "resume", "out_dir", "run_name")
    for name in (*named, "epochs", "max_steps"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--deepspeed", "--deepspeed_config", nargs="?", action=UnlessGiven)
    typed, _ = parser.parse_known_args(argv)  # the rest, and nonsense, is judged where it is used
    most = MOST_TAUGHT if typed.teacher else MOST
    run = typed.resume  # which has its own text: another teacher may be the newest by now
    if run == "auto":
        newest = run_to_resume(Path(typed.out_dir or RUNS), DISTILLATION, typed.run_name)
        run = newest and str(newest.path)
    description = read_description(typed.data or data_of(run or typed.teacher))
    tokens = description["splits"]["train"]["tokens"]
    segmentations = description.get("prepared_from", {}).get("segmentations", 1)
    steps = suited_steps(tokens, segmentations, most)
    if (typed.max_steps or "").isdigit():
        steps = int(typed.max_steps)
    elif (typed.epochs or "").isdigit():
        steps = int(typed.epochs) * tokens // TOKENS_PER_STEP
    if typed.max_steps is None and typed.epochs is None:
        print(f"--max_steps {steps}")
        if steps < most:
            said = f"for a text of {tokens:,} tokens: --max_steps {steps}, unless you give another"
            print(said, file=sys.stderr)
    print(intervals(max(1, steps)), optimizer(typed.config_file, typed.deepspeed))


if __name__ == "__main__":
    with one_line_errors("run_accelerate.sh", UsageError):
        main()
