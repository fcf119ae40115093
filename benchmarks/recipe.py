"""Measure which shape trains best in a given time, to check training/recipe.py.

    python -m benchmarks.recipe --data out/data/builtin --minutes 2,8 --shapes 3x128,3x192,4x192

Each shape first trains for a few steps, to measure its speed, and then for the steps that fit into
the time. Start and validations do not count. The cores must be free. Finished runs are reused.
"""

from pathlib import Path

import torch

from benchmarks.cli import heading, names, new_parser, numbers, table
from benchmarks.distillation import train
from common.errors import UsageError, one_line_errors, stop_in_order
from data.shards import read_description
from model import ConfigError, LMConfig, Transformer
from training.recipe import BATCH, SHAPES, Candidate, optimizer_flags, shape_settings

PROGRAM = "benchmarks.recipe"
NAMES = {f"{n_layers}x{dim}": (n_layers, dim) for n_layers, dim in SHAPES}
SPEED_STEPS = 40


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError, ConfigError):
        parser = new_parser(PROGRAM, __doc__)
        add = parser.add_argument
        data = Path("out/data/builtin")
        add("--data", nargs="+", type=Path, default=[data], help="folders of prepared data")
        add("--minutes", type=numbers, default=[1, 2, 4, 8, 16], help="minutes of training")
        add("--shapes", type=names(NAMES), default=list(NAMES)[:5], help="layers x dim in SHAPES")
        add("--seeds", type=numbers, default=[1], help="one run per seed")
        add("--flags", default="", help="more training flags")
        args = parser.parse_args(argv)
        for folder in args.data:
            read_description(folder)
        rows = [
            row(folder, NAMES[shape], minutes, seed, args.flags)
            for folder in args.data
            for shape in args.shapes
            for minutes in args.minutes
            for seed in args.seeds
        ]
        print(heading(PROGRAM, argv), table(rows), sep="\n\n")


def row(data: Path, shape: tuple[int, int], minutes: int, seed: int, more: str) -> dict:
    """Train a shape for this many minutes; return its row of the table. `more`: more flags."""
    settings = shape_settings(*shape, {})
    length = settings["max_seq_len"]
    with torch.device("meta"):
        model = Transformer(LMConfig(**settings, vocab_size=read_description(data)["vocab_size"]))
    candidate = Candidate(settings, model.num_parameters(), 0.0, length, BATCH // length)
    flags = settings | optimizer_flags(candidate, muon=True)
    flags |= {"batch_size": BATCH // length}
    words = " ".join(f"--{name} {value}" for name, value in flags.items())
    speed = train("speed", data, [words, f"{more} --max_steps {SPEED_STEPS}"], seed)
    steps = round(60 * minutes / speed.step_seconds)
    result = train("recipe", data, [words, f"{more} --max_steps {steps}"], seed)
    return {
        "text": data.name,
        "layers × dim": " × ".join(map(str, shape)),
        "minutes": minutes,
        "seed": seed,
        "steps": f"{steps:,}",
        "tokens/s": f"{BATCH / result.step_seconds:,.0f}",
        "bits per byte": f"{result.bits_per_byte:.4f}",
    }


if __name__ == "__main__":
    main()
