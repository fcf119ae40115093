"""What a teacher is worth: bits per byte on held-out text of students that had one, and had none.

    python -m benchmarks.distillation --data out/data/builtin out/data/chinese_poetry

On each text a teacher is pretrained first, and what it expects is recorded. Then students train
with every seed, in turns: alone, with the teacher beside them, and with what was recorded of it;
last, as many steps alone as take the time of those with the teacher. All are real runs with the
same model, data, batch and order; each schedule ends with its last step. The held-out text is the
validation split.

How long a step takes is measured first, by short runs in turns: free cores are needed for those
alone. Finished runs are kept, and not made again with the same data and flags.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.flags import at_least, new_parser, numbers
from benchmarks.markdown import heading, table
from benchmarks.training_runs import folder_of, make
from common.errors import UsageError, one_line_errors, stop_in_order
from data.shards import read_description
from formats.portable import load_config, read_json, write_json
from model import ConfigError
from training.cpu_steps import MUON
from training.setup import shapes_of

PROGRAM = "benchmarks.distillation"
OUT = Path("out/benchmarks/distillation")
# What run_accelerate.sh trains on a CPU, and a teacher of five times its parameters.
BATCH = f"--max_seq_len 256 --batch_size 16 --dtype bfloat16 {MUON}"
STUDENT = "--dim 192 --n_layers 4 --n_heads 4"
TEACHER = "--dim 384 --n_layers 8 --n_heads 8"
# Validation with the whole split, at the end alone; no checkpoints but the last.
QUIET = (
    "--log_interval 10 --log_with none --eval_interval 0 --eval_samples 0 --save_interval 0 "
    "--keep_last 1 --sample_tokens 1 --compile on"
)
# The runs that measure speed: in turns, validating as little as can be.
ROUNDS, PACE_STEPS = 3, 20
BRIEF = "--eval_samples 16"


@dataclass
class Result:
    """One run."""

    bits_per_byte: float  # on the validation split, at its end
    steps: int
    step_seconds: float  # median over the log intervals, validation left out
    n_parameters: int


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError, ConfigError):
        args = parse_options(argv)
        for data in args.data:  # one that is missing is said before the first run
            read_description(data)
        print(heading(PROGRAM, argv), *(compare(data, args) for data in args.data), sep="\n\n")


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(PROGRAM, __doc__)
    add = parser.add_argument
    text = "folders of prepared data"
    add("--data", nargs="+", type=Path, default=[Path("out/data/builtin")], help=text)
    of_model = "flags of training for its model alone"
    add("--student", default=STUDENT, help=of_model)
    add("--teacher", default=TEACHER, help=of_model)
    add("--batch", default=BATCH, help="flags of training for both")
    add("--steps", type=at_least(1), default=600, help="of a student")
    add("--teacher_steps", type=at_least(1), default=1200)
    add("--temperature", type=float, default=2.0, help="of distillation, and of what is recorded")
    add("--how", default="--alpha 0.5", help="other flags of distillation")
    add("--k", type=at_least(0), default=64, help="pieces that are recorded; 0: no such students")
    add("--seeds", type=numbers(0), default=[1, 2, 3], help="of students; the teacher's is 0")
    return parser.parse_args(argv)


def compare(data: Path, args: argparse.Namespace) -> str:
    """The runs on one text, and their table."""
    flags = f"{args.teacher} --max_steps {args.teacher_steps}"
    run, teacher = train("teacher", data, args.batch, flags, seed=0)
    how = f"--temperature {args.temperature:g} {args.how}"

    def student(kind: str, seed: int, steps: int = args.steps, brief: str = "") -> Result:
        stage = "distillation" if teaching[kind] else "pretrain"
        flags = f"{args.student} --max_steps {steps} {brief} {teaching[kind]}".strip()
        return train(kind, data, args.batch, flags, seed, stage)[1]

    teaching = {
        "alone": "",
        "distilled": f"--teacher {shlex.quote(str(run))} {how}",
    }
    said = ""
    if args.k:
        recorded, said = record(run, data, args)
        teaching["recorded"] = f"--teacher_logits {shlex.quote(str(recorded))} {how}"
    seconds = step_seconds(student, list(teaching))
    found = {kind: [] for kind in teaching}
    for seed in args.seeds:
        for kind, results in found.items():
            results.append(student(kind, seed))
    alone, distilled = found["alone"], found["distilled"]
    as_long = round(seconds["distilled"] / seconds["alone"] * args.steps)
    longer = [student("alone", seed, as_long) for seed in args.seeds]
    rows = [row("teacher", [teacher]), row("alone", alone, seconds["alone"])]
    rows.append(row("distilled", distilled, seconds["distilled"], alone))
    if args.k:
        name = f"distilled, {args.k} pieces recorded"
        rows.append(row(name, found["recorded"], seconds["recorded"], alone))
    rows.append(row("alone, as long as distilled", longer, seconds["alone"], alone))
    times = teacher.n_parameters / alone[0].n_parameters
    return (
        f"### {data.name}: `{how}`\n\nBoth: `{args.batch}`. Student: `{args.student}`, "
        f"{alone[0].n_parameters / 1e6:.2f} million parameters; teacher: `{args.teacher}`, "
        f"{times:.1f} times as many. Bits per byte of the validation split at each run's end; "
        f"seconds are steps times the median step of {ROUNDS} short runs in turns. {said}\n\n"
        f"{table(rows)}\n\n{closing_line(data.name, alone, distilled, longer)}"
    )


def step_seconds(student: Callable[..., Result], kinds: list[str]) -> dict[str, float]:
    """How long a step of each kind takes: the median of short runs in turns."""
    runs = {kind: [] for kind in kinds}
    for seed in range(ROUNDS):
        for kind, seconds in runs.items():
            seconds.append(student(kind, seed, PACE_STEPS, BRIEF).step_seconds)
    return {kind: statistics.median(seconds) for kind, seconds in runs.items()}


def row(
    name: str,
    results: list[Result],
    step_seconds: float | None = None,
    beside: list[Result] | None = None,
) -> dict:
    """Of one kind of run with all seeds, and how far it is from another kind."""
    found, steps = [result.bits_per_byte for result in results], results[0].steps
    return {
        "": name,
        "steps": f"{steps:,}",
        "seconds": f"{steps * step_seconds:.0f}" if step_seconds else "",
        "bits per byte, by seed": ", ".join(f"{value:.4f}" for value in found),
        "mean": f"{statistics.mean(found):.4f}",
        "against alone": "" if beside is None else spread(differences(results, beside)),
    }


def differences(results: list[Result], beside: list[Result]) -> list[float]:
    """In bits per byte, seed by seed; negative where `results` are better."""
    return [
        one.bits_per_byte - other.bits_per_byte for one, other in zip(results, beside, strict=True)
    ]


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):+.4f} ({min(values):+.4f} to {max(values):+.4f})"


def closing_line(
    name: str, alone: list[Result], distilled: list[Result], as_long: list[Result]
) -> str:
    same_steps, same_time = (spread(differences(distilled, each)) for each in (alone, as_long))
    return (
        f"**{name}: distilled against alone {same_steps} bits per byte after as many steps, "
        f"{same_time} after as much time**"
    )


def train(
    kind: str, data: Path, batch: str, flags: str, seed: int, stage: str = "pretrain"
) -> tuple[Path, Result]:
    """Its folder too. Raises UsageError: the training program failed."""
    told = [batch, QUIET, flags]
    run = folder_of(OUT, kind, data, told, seed)
    make(run, data, told, seed, stage)
    return run, read(run)


def read(run: Path) -> Result:
    """What a run has left; the first step, which compiles, does not count for its speed."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = list(map(json.loads, lines))
    timed = [row for row in rows if row["step"] > 1 and "step_seconds" in row]
    last = [row for row in rows if "val_bits_per_byte" in row][-1]
    return Result(
        bits_per_byte=last["val_bits_per_byte"],
        steps=last["step"],
        step_seconds=statistics.median(row["step_seconds"] for row in timed),
        n_parameters=shapes_of(load_config(run / "weights")).num_parameters(),
    )


def record(teacher: Path, data: Path, args: argparse.Namespace) -> tuple[Path, str]:
    """What the teacher expects of the training split, unless it has been recorded before, and a
    sentence on it. Raises UsageError: the program failed."""
    out = teacher.with_name(f"{teacher.name}-{args.k}-of-{args.temperature:g}")
    about = out.with_name(f"{out.name}.json")
    if not about.exists():
        print(f"{out.name} ...", file=sys.stderr, flush=True)
        words = [sys.executable, "-m", "scripts.teacher_logits", str(teacher), "--data", str(data)]
        words += ["--out", str(out), "--k", str(args.k), "--temperature", str(args.temperature)]
        ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = "".join(ended.stdout.splitlines()[-1:])
        if ended.returncode:
            raise UsageError(f"{out.name} failed: {said}")
        write_json(about, {"said": said})
    return out, f"Recorded: {read_json(about)['said']}."


if __name__ == "__main__":
    main()
