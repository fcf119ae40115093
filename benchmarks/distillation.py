"""Measure the gain from a teacher: bits per byte of students with and without a teacher.

    python -m benchmarks.distillation --data out/data/builtin out/data/chinese_poetry

For each text, a teacher is pretrained first. Then students train with every seed, alone and with
the teacher. Last, students train alone for as long as the students with the teacher took. All
students have the same shape, data and batch. Equal seeds mean the same order of data. Each
learning-rate schedule ends with the last step of its run. Bits per byte are measured on the
validation split. The column `seconds` is the number of steps times the median step time; other work
on the cores increases it. A run is not repeated if a finished run has the same data and flags.
"""

import argparse
import shlex
import statistics
from pathlib import Path

from benchmarks.cli import heading, new_parser, table
from benchmarks.trained import Result, train
from lm.common.errors import UsageError, one_line_errors, stop_in_order
from lm.data.shards import read_description
from lm.training.arguments import DistillationArguments, TrainingArguments
from model import ConfigError

PROGRAM = "benchmarks.distillation"
MUON_FLAGS = "--optimizer muon --learning_rate 1e-2 --lr_schedule wsd --decay_fraction 1"
BATCH = f"--max_seq_len 256 --batch_size 16 --min_lr_ratio 0 {MUON_FLAGS}"
# With a vocabulary of 4,096 or 6,400 the teacher has 5 to 6 times the parameters of a student.
STUDENT = "--dim 192 --n_layers 4 --n_heads 4"
TEACHER = "--dim 384 --n_layers 8 --n_heads 8"


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError, ConfigError):
        args = parse_options(argv)
        for data in args.data:  # report missing data before the first run
            read_description(data)
        print(heading(PROGRAM, argv), *(compare(data, args) for data in args.data), sep="\n\n")


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(PROGRAM, __doc__)
    add = parser.add_argument
    text = "folders of prepared data"
    add("--data", nargs="+", type=Path, default=[Path("out/data/builtin")], help=text)
    of_model = "training flags for this model only"
    add("--student", default=STUDENT, help=of_model)
    add("--teacher", default=TEACHER, help=of_model)
    add("--batch", default=BATCH, help="training flags for both models")
    add("--steps", type=int, default=600, help="steps of a student")
    add("--teacher_steps", type=int, default=1200, help="steps of the teacher")
    add("--how", default="--temperature 2 --alpha 0.5", help="flags of distillation")
    seeds = "seeds of the students; the seed of the teacher is 0"
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help=seeds)
    return parser.parse_args(argv)


def compare(data: Path, args: argparse.Namespace) -> str:
    """Train all runs on one text and return the table."""
    flags = [args.batch, f"{args.teacher} --max_steps {args.teacher_steps}"]
    teacher = train("teacher", data, flags, seed=0)
    stages = {
        "alone": (TrainingArguments, ""),
        "distilled": (
            DistillationArguments,
            f"--teacher {shlex.quote(str(teacher.run))} {args.how}",
        ),
    }

    def student(kind: str, seed: int, steps: int = args.steps) -> Result:
        stage, taught = stages[kind]
        flags = f"{args.student} --max_steps {steps} {taught}"
        return train(kind, data, [args.batch, flags], seed, stage)

    pairs = [(student("alone", seed), student("distilled", seed)) for seed in args.seeds]
    alone, distilled = map(list, zip(*pairs, strict=True))
    as_long = round(step_seconds(distilled) / step_seconds(alone) * args.steps)
    longer = [student("alone", seed, as_long) for seed in args.seeds]
    rows = [
        row("teacher", [teacher]),
        row("alone", alone),
        row("distilled", distilled, alone),
        row("alone, as long as distilled", longer, alone),
    ]
    return (
        f"### {data.name}: `{args.how}`\n\nAll models: `{args.batch}`. Student: `{args.student}`. "
        f"Teacher: `{args.teacher}`. Bits per byte of the validation split at each run's end.\n\n"
        f"{table(rows)}\n\n**{data.name}: distilled against alone "
        f"{differences(distilled, alone)} bits per byte after equal steps, "
        f"{differences(distilled, longer)} after equal time**"
    )


def step_seconds(results: list[Result]) -> float:
    return statistics.median(result.step_seconds for result in results)


def row(name: str, results: list[Result], others: list[Result] | None = None) -> dict:
    """Return the table row of one kind of run, over all seeds, with the difference to `others`."""
    found, steps = [result.bits_per_byte for result in results], results[0].steps
    return {
        "": name,
        "steps": f"{steps:,}",
        "seconds": f"{steps * step_seconds(results):.0f}",
        "bits per byte, by seed": ", ".join(f"{value:.4f}" for value in found),
        "mean": f"{statistics.mean(found):.4f}",
        "against alone": "" if others is None else differences(results, others),
    }


def differences(results: list[Result], others: list[Result]) -> str:
    """For each seed, subtract the bits per byte of `others` from those of `results`. Return "mean
    (lowest to highest)" of the differences. If they are negative, `results` are better."""
    pairs = zip(results, others, strict=True)
    values = [one.bits_per_byte - other.bits_per_byte for one, other in pairs]
    return f"{statistics.mean(values):+.4f} ({min(values):+.4f} to {max(values):+.4f})"


if __name__ == "__main__":
    main()
