"""How long a challenger takes to the validation loss of a tuned AdamW run.

    python -m benchmarks.time_to_loss --data out/data/builtin

AdamW's learning rate is chosen first, as the best of several at the end of the full schedule. Then
both train with every seed, in turns: AdamW for --steps, the challenger for a third of them, on its
own schedule. All runs are real ones of train_pretrain_accelerate.py with the same model, data,
batch and order; finished ones are kept, and not run again with the same data and flags.
"""

import argparse
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.cli import at_least, heading, new_parser, numbers, table
from benchmarks.training_runs import RunResult, train
from common.errors import UsageError, one_line_errors, stop_in_order
from data.shards import read_description

PROGRAM = "benchmarks.time_to_loss"
OUT = Path("out/benchmarks/time_to_loss")
# The model of run_accelerate.sh on a CPU, and 8,192 tokens per step.
MODEL = (
    "--dim 192 --n_layers 4 --n_heads 4 --max_seq_len 256 --batch_size 32 --accumulation_steps 1"
)
SHORT, SHORT_EVAL_INTERVAL = 0.34, 5  # share of the steps; steps between validations
LEARNING_RATES = (1e-3, 2e-3, 4e-3, 8e-3)  # tried for AdamW
# Found on one seed of the built-in corpus (docs/lab-log.md). A short schedule that ends at zero
# wants quick averages, and the embedding, which AdamW steps, a high rate.
CHALLENGER = (
    "--optimizer muon --muon_learning_rate 0.03 --muon_momentum 0.85 --learning_rate 0.02 "
    "--beta1 0.7 --beta2 0.9 --grad_clip 0 --lr_schedule wsd --decay_fraction 1 --min_lr_ratio 0"
)


@dataclass
class Race:
    """AdamW and the challenger with one seed."""

    seed: int
    adamw: RunResult
    challenger: RunResult

    @property
    def steps(self) -> int | None:
        """The first validated step of the challenger with AdamW's final loss; None: never."""
        losses = sorted(self.challenger.losses.items())
        return next((step for step, loss in losses if loss <= self.adamw.final), None)

    @property
    def step_ratio(self) -> float:
        """Time of a challenger's step in that of AdamW's."""
        return self.challenger.step_seconds / self.adamw.step_seconds

    @property
    def share_of_time(self) -> float | None:
        return self.steps and self.steps / self.adamw.steps * self.step_ratio

    def row(self) -> dict:
        steps, reached = self.steps, self.steps is not None
        return {
            "seed": self.seed,
            "AdamW's final loss": f"{self.adamw.final:.4f}",
            "its seconds": f"{self.adamw.steps * self.adamw.step_seconds:.1f}",
            "challenger: steps to it": steps or f"not in {self.challenger.steps}",
            "tokens": f"{steps * self.challenger.tokens_per_step:,}" if reached else "",
            "seconds": f"{steps * self.challenger.step_seconds:.1f}" if reached else "",
            "share of steps": f"{steps / self.adamw.steps:.1%}" if reached else "",
            "time per step": f"{self.step_ratio:.3f}",
            "share of time": f"{self.share_of_time:.1%}" if reached else "",
            "challenger's final loss": f"{self.challenger.final:.4f}",
        }


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError):
        args = parse_options(argv)
        for data in args.data:  # one that is missing is said before the first run
            read_description(data)
        print(heading(PROGRAM, argv), *(compare(data, args) for data in args.data), sep="\n\n")


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(PROGRAM, __doc__)
    add, default = parser.add_argument, [Path("out/data/builtin")]
    add("--data", nargs="+", type=Path, default=default, help="folders of prepared data")
    add("--steps", type=at_least(20), default=200, help="of AdamW")
    add("--seeds", type=numbers(0), default=[1, 2, 3], help="AdamW is tuned with the first")
    add("--model", default=MODEL, help="flags of model and batch")
    return parser.parse_args(argv)


def compare(data: Path, args: argparse.Namespace) -> str:
    """Make the runs on one text and return their table."""

    def adamw(rate: float, seed: int) -> RunResult:
        flags = f"--optimizer adamw --learning_rate {rate} --max_steps {args.steps}"
        return train(OUT, "adamw", data, [args.model, f"{flags} --eval_interval 0"], seed)

    tried = {rate: adamw(rate, args.seeds[0]).final for rate in LEARNING_RATES}
    best = min(tried, key=tried.get)
    short = f"--max_steps {round(SHORT * args.steps)} --eval_interval {SHORT_EVAL_INTERVAL}"
    flags = [args.model, f"{CHALLENGER} {short}"]
    challenger = partial(train, OUT, "challenger", data, flags)
    races = [Race(seed, adamw(best, seed), challenger(seed)) for seed in args.seeds]
    rates = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in tried.items())
    return (
        f"### {data.name}: `{CHALLENGER}` against AdamW\n\nModel and batch: `{args.model}`. "
        f"AdamW's validation loss after {args.steps} steps by learning rate: {rates}; {best:g} is "
        "used. Seconds are steps times the median step of the run, without validation and "
        f"compilation.\n\n{table([race.row() for race in races])}\n"
        f"{closing_line(data.name, races)}"
    )


def closing_line(name: str, races: list[Race]) -> str:
    """Return a sentence on the worst and the median seed; "" if one did not reach the loss."""
    shares = [race.share_of_time for race in races]
    if None in shares:
        return ""
    ratio = statistics.median(race.step_ratio for race in races)
    return (
        f"\n**{name}: {max(shares):.1%} of AdamW's time in the worst of {len(races)} seeds, "
        f"{statistics.median(shares):.1%} in the median; a step takes {ratio:.3f} as long**"
    )


if __name__ == "__main__":
    main()
