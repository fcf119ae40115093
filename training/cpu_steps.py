"""Flags that run_accelerate.sh takes on a CPU: steps, optimizer and intervals.

With dropout a text could be read more often, but dropout takes attention on a CPU off its fast
path: in the same time less is learned than with other ways to cut the text, see
data/encoding.py.
"""

from data.shards import read_description

PASSES = 4  # further passes teach less and less (https://arxiv.org/abs/2305.16264)
TOKENS_PER_STEP = 4096  # of run_accelerate.sh on a CPU
LEAST, MOST = 100, 600  # steps
TAUGHT = 180  # with a teacher, which reads every batch too
# Muon's validation loss ends 0.6 below AdamW's. The rate falls straight from its peak to 0.
MUON = {
    "optimizer": "muon",
    "muon_learning_rate": 0.02,
    "learning_rate": 1e-2,
    "lr_schedule": "wsd",
    "decay_fraction": 1.0,
    "min_lr_ratio": 0.0,
}
ADAMW = {"optimizer": "adamw", "learning_rate": 3e-3}


def cpu_flags(typed: dict, takes_muon: bool) -> dict:
    """Return the flags that were not typed, with values for a run of a few minutes.

    The steps are those of PASSES over the text, within bounds; of one pass where the text is packed
    in several segmentations. A run is looked at six times, or every 100 steps.

    Args:
        typed: with "teacher", or "data", the folder of prepared text.
        takes_muon: whether the engine leaves matrices whole and in place.

    Raises DataError: "data" is not prepared text.
    """
    steps = longest = TAUGHT
    if "teacher" not in typed:
        description = read_description(typed["data"])
        several = description.get("prepared_from", {}).get("segmentations", 1) > 1
        per_pass = description["splits"]["train"]["tokens"] / TOKENS_PER_STEP
        steps = min(MOST, max(LEAST, int((1 if several else PASSES) * per_pass)))
        longest = typed.get("epochs", 0) * per_pass or steps
    most = max(1, typed.get("max_steps") or int(longest))
    often = min(100, most, max(20, most // 6))
    flags = {
        "max_steps": steps,
        "log_interval": min(20, most),
        "eval_interval": often,
        "sample_interval": often,
        "save_interval": min(2 * often, most),
    }
    if "epochs" in typed:
        del flags["max_steps"]
    flags |= MUON if takes_muon else ADAMW
    return {name: value for name, value in flags.items() if name not in typed}
