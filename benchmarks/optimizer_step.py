"""What Muon costs: a training step with it and one with AdamW, in turns in one process.

    python -m benchmarks.optimizer_step --dim 192 --n_layers 4 --n_heads 4 --max_seq_len 256 \
        --batch_size 32

Without engine. The flags are the training script's, as far as they matter here.
"""

import argparse
import statistics
import time

from benchmarks.cli import at_least, heading, new_parser
from benchmarks.matmul import synchronize
from benchmarks.ours import OurStep
from benchmarks.work import DATA, SIZES, Work, find_data
from common.errors import UsageError, one_line_errors
from model import ConfigError
from training.arguments import COMPILE, OPTIMIZERS

PROGRAM = "benchmarks.optimizer_step"
WARMUP = 3


def main(argv: list[str] | None = None) -> None:
    with one_line_errors(PROGRAM, UsageError, ConfigError):
        options, work = parse_options(argv)
        flags = [*work.flags(), "--compile", options.compile, "--optimizer"]
        steps = {name: OurStep([*flags, name]) for name in OPTIMIZERS}
        seconds = measure(steps, options.rounds)
    print(f"{heading(PROGRAM, argv)}\n\n{describe(seconds)}")


def parse_options(argv: list[str] | None) -> tuple[argparse.Namespace, Work]:
    """Return the flags and the work of a step."""
    parser = new_parser(PROGRAM, __doc__)
    add, default = parser.add_argument, SIZES["26m"]
    shape = ("dim", "n_layers", "n_heads", "batch_size")
    for name in shape:
        add(f"--{name}", type=at_least(1), default=getattr(default, name), help="as in training")
    add("--max_seq_len", type=at_least(1), default=default.seq_len, help="as in training")
    add("--compile", choices=COMPILE, default="on", help="as in training")
    add("--data", default=DATA, help="folder of prepared text")
    add("--rounds", type=at_least(1), default=25, help="steps of each optimizer")
    options = parser.parse_args(argv)
    given = {name: getattr(options, name) for name in shape}
    return options, Work(**given, seq_len=options.max_seq_len, data=find_data(options.data))


def measure(steps: dict[str, OurStep], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Take every step in turn, so that a disturbance of the machine disturbs all of them; return
    the `timed` of each round by name."""
    for _ in range(WARMUP):
        for step in steps.values():
            step.step()
    seconds = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(timed(step))
    return seconds


def timed(step: OurStep) -> tuple[float, float]:
    """Return the seconds of one step, whole and of the update: clipping, stepping, clearing."""
    started = time.perf_counter()
    step.forward_backward()
    synchronize(step.device)
    before = time.perf_counter()
    step.update()
    synchronize(step.device)
    ended = time.perf_counter()
    return ended - started, ended - before


def describe(seconds: dict[str, list[tuple[float, float]]]) -> str:
    """Return medians, and the median of the ratios within a round."""
    lines = []
    for name, rounds in seconds.items():
        whole, update = (1000 * statistics.median(times) for times in zip(*rounds, strict=True))
        lines.append(f"{name}: {whole:.1f} ms per step, {update:.1f} ms of it the update")
    pairs = zip(seconds["muon"], seconds["adamw"], strict=True)
    ratio = statistics.median(muon / adamw for (muon, _), (adamw, _) in pairs)
    return "\n".join([*lines, f"a step with Muon takes {ratio:.3f} as long as one with AdamW"])


if __name__ == "__main__":
    main()
