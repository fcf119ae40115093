"""How long a challenger takes to the validation loss of a tuned AdamW run.

    python -m benchmarks.time_to_loss --data out/data/builtin

AdamW's learning rate is chosen first, as the best of several at the end of the full schedule. Then
both train with every seed, in turns: AdamW for STEPS, the challenger for SHORT_STEPS of its own
schedule. All runs are real ones of train_pretrain_accelerate.py with the same model, data, batch
and order; finished ones are kept, and not run again with the same data and flags.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.flags import new_parser
from benchmarks.markdown import heading, table
from benchmarks.training_runs import folder_of, make
from common.errors import UsageError, one_line_errors, stop_in_order
from data.shards import read_description

PROGRAM = "benchmarks.time_to_loss"
OUT = Path("out/benchmarks/time_to_loss")
# The model of run_accelerate.sh on a CPU, and 8,192 tokens per step.
MODEL = (
    "--dim 192 --n_layers 4 --n_heads 4 --max_seq_len 256 --batch_size 32 --accumulation_steps 1"
)
STEPS, SHORT_STEPS, SHORT_EVAL_INTERVAL = 200, 68, 5
LEARNING_RATES = (1e-3, 2e-3, 4e-3, 8e-3)  # tried for AdamW
SEEDS = (1, 2, 3)
# Found on one seed of the built-in corpus (docs/lab-log.md). A short schedule that ends at zero
# wants quick averages, and the embedding, which AdamW steps, a high rate.
CHALLENGER = (
    "--optimizer muon --muon_learning_rate 0.03 --muon_momentum 0.85 --learning_rate 0.02 "
    "--beta1 0.7 --beta2 0.9 --grad_clip 0 --lr_schedule wsd --decay_fraction 1 --min_lr_ratio 0"
)
# What the runs keep and report: validation with the whole split, no checkpoints but the last.
QUIET = (
    "--log_interval 10 --log_with none --eval_samples 0 --save_interval 0 --keep_last 1 "
    "--sample_tokens 1 --compile on"
)


@dataclass
class Result:
    """One run: its validation losses, and how fast it went."""

    losses: dict[int, float]  # step → validation loss
    step_seconds: float  # median over the log intervals, validation left out
    tokens_per_step: int

    @property
    def final(self) -> float:
        return self.losses[max(self.losses)]

    def steps_to(self, loss: float) -> int | None:
        """The first validated step at which the loss was reached."""
        return next((step for step, value in sorted(self.losses.items()) if value <= loss), None)


@dataclass
class Race:
    """AdamW and the challenger with one seed."""

    seed: int
    adamw: Result
    challenger: Result

    @property
    def steps(self) -> int | None:
        """The challenger's, to AdamW's final loss."""
        return self.challenger.steps_to(self.adamw.final)

    @property
    def share_of_steps(self) -> float | None:
        return None if self.steps is None else self.steps / max(self.adamw.losses)

    @property
    def step_ratio(self) -> float:
        """Time of a challenger's step in that of AdamW's."""
        return self.challenger.step_seconds / self.adamw.step_seconds

    @property
    def share_of_time(self) -> float | None:
        return None if self.steps is None else self.share_of_steps * self.step_ratio

    def row(self) -> dict:
        reached = self.steps is not None
        return {
            "seed": self.seed,
            "AdamW's final loss": f"{self.adamw.final:.4f}",
            "its seconds": f"{max(self.adamw.losses) * self.adamw.step_seconds:.1f}",
            "challenger: steps to it": self.steps or f"not in {max(self.challenger.losses)}",
            "tokens": f"{self.steps * self.challenger.tokens_per_step:,}" if reached else "",
            "seconds": f"{self.steps * self.challenger.step_seconds:.1f}" if reached else "",
            "share of steps": f"{self.share_of_steps:.1%}" if reached else "",
            "time per step": f"{self.step_ratio:.3f}",
            "share of time": f"{self.share_of_time:.1%}" if reached else "",
            "challenger's final loss": f"{self.challenger.final:.4f}",
        }


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError):
        folders = parse_options(argv).data
        for data in folders:  # one that is missing is said before the first run
            read_description(data)
        print(heading(PROGRAM, argv), *map(compare, folders), sep="\n\n")


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(PROGRAM, __doc__)
    default = [Path("out/data/builtin")]
    text = "folders of prepared data"
    parser.add_argument("--data", nargs="+", type=Path, default=default, help=text)
    return parser.parse_args(argv)


def compare(data: Path) -> str:
    """The runs on one data set, and their table."""

    def adamw(rate: float, seed: int) -> Result:
        flags = f"--optimizer adamw --learning_rate {rate} --max_steps {STEPS} --eval_interval 0"
        return train("adamw", data, flags, seed)

    tried = {rate: adamw(rate, SEEDS[0]).final for rate in LEARNING_RATES}
    best = min(tried, key=tried.get)
    flags = f"{CHALLENGER} --max_steps {SHORT_STEPS} --eval_interval {SHORT_EVAL_INTERVAL}"
    races = [
        Race(seed, adamw(best, seed), train("challenger", data, flags, seed)) for seed in SEEDS
    ]
    rates = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in tried.items())
    return (
        f"### {data.name}: `{CHALLENGER}` against AdamW\n\nModel and batch: `{MODEL}`. "
        f"AdamW's validation loss after {STEPS} steps by learning rate: {rates}; {best:g} is used. "
        "Seconds are steps times the median step of the run, without validation and compilation."
        f"\n\n{table([race.row() for race in races])}\n{closing_line(data.name, races)}"
    )


def closing_line(name: str, races: list[Race]) -> str:
    """The worst and the median seed; nothing if one did not reach the loss."""
    shares = [race.share_of_time for race in races]
    if None in shares:
        return ""
    ratio = statistics.median(race.step_ratio for race in races)
    return (
        f"\n**{name}: {max(shares):.1%} of AdamW's time in the worst of {len(races)} seeds, "
        f"{statistics.median(shares):.1%} in the median; a step takes {ratio:.3f} as long**"
    )


def run_folder(kind: str, data: Path, flags: str, seed: int) -> Path:
    return folder_of(OUT, kind, data, [MODEL, QUIET, flags], seed)


def train(kind: str, data: Path, flags: str, seed: int) -> Result:
    """One run, unless it has been made before. Raises UsageError: the training script failed."""
    run = run_folder(kind, data, flags, seed)
    make(run, data, [MODEL, QUIET, flags], seed)
    return read(run / "metrics.jsonl")


def read(metrics: Path) -> Result:
    """What a run has logged; the first step, which compiles, does not count for its speed."""
    rows = list(map(json.loads, metrics.read_text(encoding="utf-8").splitlines()))
    timed = [row for row in rows if row["step"] > 1 and "step_seconds" in row]
    return Result(
        losses={row["step"]: row["val_loss"] for row in rows if "val_loss" in row},
        step_seconds=statistics.median(row["step_seconds"] for row in timed),
        tokens_per_step=timed[0]["tokens"] // timed[0]["step"],
    )


if __name__ == "__main__":
    main()
