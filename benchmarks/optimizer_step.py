"""What Muon costs: a training step with it and one with AdamW, in turns in one process.

    python -m benchmarks.optimizer_step --dim 192 --n_layers 4 --n_heads 4 --max_seq_len 256 \
        --batch_size 32

Compiled, without engine. Its flags are the training script's, as far as they matter here.
"""

import statistics
import time

import torch

from benchmarks.flags import at_least, new_parser
from benchmarks.markdown import heading
from benchmarks.matmul import synchronize
from benchmarks.ours import OurStep
from benchmarks.work import SIZES, Work
from common.errors import UsageError, one_line_errors
from model import ConfigError
from training.arguments import OPTIMIZERS
from training.engine.compilation import obstacle

PROGRAM = "benchmarks.optimizer_step"
WARMUP = 3


def main(argv: list[str] | None = None) -> None:
    with one_line_errors(PROGRAM, UsageError, ConfigError):
        work, rounds = parse_options(argv)
        if reason := obstacle(torch.device("cuda" if torch.cuda.is_available() else "cpu")):
            raise UsageError(f"cannot compile: {reason}")
        steps = {name: OurStep(work, compiled=True, optimizer=name) for name in OPTIMIZERS}
        seconds = measure(steps, rounds)
    print(heading(PROGRAM, argv) + "\n")
    print(describe(seconds))


def parse_options(argv: list[str] | None) -> tuple[Work, int]:
    """The work of a step, and how many rounds to take.

    Raises:
        UsageError, ConfigError: a value that cannot work.
    """
    parser = new_parser(PROGRAM, __doc__)
    add, default = parser.add_argument, SIZES["26m"]
    for name in ("dim", "n_layers", "n_heads", "batch_size"):
        add(f"--{name}", type=at_least(1), default=getattr(default, name), help="as in training")
    add("--max_seq_len", type=at_least(1), default=default.seq_len, help="as in training")
    add("--rounds", type=at_least(1), default=25, help="steps of each optimizer")
    values = vars(parser.parse_args(argv))
    rounds, seq_len = values.pop("rounds"), values.pop("max_seq_len")
    work = Work(**values, seq_len=seq_len)
    _ = work.config  # refuses a shape that cannot work
    return work, rounds


def measure(steps: dict[str, OurStep], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Every step in turn, so that what disturbs the machine disturbs all of them; by name, the
    `timed` of each round."""
    for _ in range(WARMUP):
        for step in steps.values():
            step.step()
    seconds = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(timed(step))
    return seconds


def timed(step: OurStep) -> tuple[float, float]:
    """Seconds of one step, whole and of the update, which clips, steps and clears the gradient."""
    started = time.perf_counter()
    step.forward_backward()
    synchronize(step.device)
    before = time.perf_counter()
    step.update()
    synchronize(step.device)
    ended = time.perf_counter()
    return ended - started, ended - before


def describe(seconds: dict[str, list[tuple[float, float]]]) -> str:
    """Medians, and the median of the ratios within a round."""
    lines = []
    for name, rounds in seconds.items():
        whole, update = (1000 * statistics.median(times) for times in zip(*rounds, strict=True))
        lines.append(f"{name}: {whole:.1f} ms per step, {update:.1f} ms of it the update")
    pairs = zip(seconds["muon"], seconds["adamw"], strict=True)
    ratio = statistics.median(muon / adamw for (muon, _), (adamw, _) in pairs)
    return "\n".join([*lines, f"a step with Muon takes {ratio:.3f} as long as one with AdamW"])


if __name__ == "__main__":
    main()
