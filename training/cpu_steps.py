"""Flags that run_accelerate.sh adds on a CPU: steps, optimizer and intervals.

    python -m training.cpu_steps --config_file FILE --data out/data/NAME [flags that were typed]

With --teacher in place of --data the steps are always the same.

They go to stdout; what a small text is given is said on stderr. Flags that were typed stand behind
them and win. (With dropout a text could be read more often, but dropout takes attention on a CPU
off its fast path: in the same time less is learned than with other ways to cut the text, see
data/segmentation.py.)
"""

import argparse
import json
import sys
from pathlib import Path

import yaml

from common.errors import UsageError, one_line_errors
from common.parser import UnlessGiven
from data.shards import read_description

PASSES = 4  # further passes teach less and less (https://arxiv.org/abs/2305.16264)
TOKENS_PER_STEP = 4096  # of run_accelerate.sh on a CPU
LEAST, MOST = 100, 600  # steps
TAUGHT = 180  # with a teacher, which reads every batch too
# Muon's validation loss ends 0.6 below AdamW's. The rate falls straight from its peak to 0.
MUON = (
    "--optimizer muon --muon_learning_rate 0.02 --learning_rate 1e-2 --lr_schedule wsd "
    "--decay_fraction 1 --min_lr_ratio 0"
)
ADAMW = "--optimizer adamw --learning_rate 3e-3"


def suited_steps(tokens: int, segmentations: int) -> int:
    """Return the steps for PASSES over the text, within bounds; for one pass where the text is
    packed in several segmentations."""
    passes = PASSES if segmentations == 1 else 1
    return min(MOST, max(LEAST, passes * tokens // TOKENS_PER_STEP))


def intervals(steps: int) -> str:
    """Return flags with which a run is looked at six times, or every 100 steps."""
    often = min(100, steps, max(20, steps // 6))
    return (
        f"--log_interval {min(20, steps)} --eval_interval {often} --sample_interval {often} "
        f"--save_interval {min(2 * often, steps)}"
    )


def optimizer(config_file: str | None, deepspeed: str | None) -> str:
    """Return flags of Muon, or of AdamW where the engine divides or offloads matrices.

    Args:
        config_file: Accelerate's. A file that cannot be read is refused later, where it is used.
        deepspeed: DeepSpeed's, in place of the one that `config_file` names.
    """
    try:
        section = {"deepspeed_config_file": deepspeed}
        if not deepspeed:
            section = yaml.safe_load(Path(config_file).read_text("utf-8"))["deepspeed_config"]
        stage = section.get("zero_stage")  # the launcher's own fields
        device = section.get("offload_optimizer_device")
        if path := section.get("deepspeed_config_file"):
            zero = json.loads(Path(path).read_text("utf-8"))["zero_optimization"]
            stage = zero["stage"]
            device = (zero.get("offload_optimizer") or {}).get("device") or zero.get("cpu_offload")
        return ADAMW if stage == 3 or device not in (None, False, "none") else MUON
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return MUON


def main(argv: list[str] | None = None) -> None:
    """Print the flags. Raises DataError: --data is not prepared text."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("config_file", "data", "teacher", "epochs", "max_steps"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--deepspeed", "--deepspeed_config", nargs="?", action=UnlessGiven)
    typed, _ = parser.parse_known_args(argv)  # other flags are judged where they are used
    steps, note = TAUGHT, ""
    if not typed.teacher:
        description = read_description(typed.data)
        tokens = description["splits"]["train"]["tokens"]
        segmentations = description.get("prepared_from", {}).get("segmentations", 1)
        steps = suited_steps(tokens, segmentations)
        note = f"for a text of {tokens:,} tokens: --max_steps {steps}, unless you give another"
    if typed.max_steps is None and typed.epochs is None:
        print(f"--max_steps {steps}")
        if note and steps < MOST:
            print(note, file=sys.stderr)
    elif (typed.max_steps or "").isdigit():
        steps = int(typed.max_steps)
    elif (typed.epochs or "").isdigit() and not typed.teacher:
        steps = int(typed.epochs) * tokens // TOKENS_PER_STEP
    print(intervals(max(1, steps)), optimizer(typed.config_file, typed.deepspeed))


if __name__ == "__main__":
    with one_line_errors("run_accelerate.sh", UsageError):
        main()
