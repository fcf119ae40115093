"""Train a model for a benchmark, or take the result of the same run before."""

import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks import REPOSITORY
from benchmarks.cli import say
from lm.common.errors import UsageError
from lm.data.shards import DESCRIPTION_FILE
from lm.training.arguments import TrainingArguments, as_arguments, build_parser
from model import LMConfig

OUT = Path("out/benchmarks/runs")
# Validate on the whole split, only at the end; keep only the last checkpoint.
QUIET = (
    "--log_interval 10 --log_with none --eval_interval 0 --eval_samples 0 --save_interval 0 "
    "--keep_last 1 --sample_tokens 1 --compile on"
)


class Result(NamedTuple):
    """The result of a finished run."""

    run: Path
    bits_per_byte: float  # on the validation split, at the end
    steps: int
    step_seconds: float  # median over log intervals, without validations and the first step


def train(
    kind: str,
    data: Path,
    flags: list[str],
    seed: int,
    stage: type[TrainingArguments] = TrainingArguments,
) -> Result:
    """Train a model, unless a finished run has the same text, flags, defaults of other flags and
    number of threads. Return the result.

    Args:
        flags: each string holds one or more flags; the last string is printed.
        stage: the flags of the training program.

    Raises UsageError or ConfigError for wrong flags, UsageError if the training program failed.
    """
    description = (data / DESCRIPTION_FILE).read_text(encoding="utf-8")
    words = shlex.split(" ".join([QUIET, *flags]))
    typed = vars(build_parser(stage).parse_args(words))
    arguments, settings = as_arguments(typed, stage)  # defaults may depend on other flags
    inputs = [str(data.resolve()), description, words, arguments, LMConfig(**settings)]
    inputs.append(os.environ.get("OMP_NUM_THREADS"))  # it decides the time of a step
    digest = hashlib.sha256(repr(inputs).encode()).hexdigest()[:8]
    run = OUT / f"{data.resolve().name}-{kind}-{digest}-seed{seed}"
    if not (run / "weights").exists():
        say(f"{run.name}: {flags[-1]} ...")
        words = [sys.executable, str(REPOSITORY / stage.program), *words]
        words += ["--seed", str(seed), "--data", str(data), "--out_dir", str(OUT)]
        words += ["--run_name", run.name, "--resume", "auto"]
        ended = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode or not (run / "weights").exists():
            raise UsageError(f"{run.name} failed: {''.join(ended.stdout.splitlines()[-1:])}")
    metrics = (run / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in metrics.splitlines()]
    last = [row for row in rows if "val_bits_per_byte" in row][-1]
    timed = [row["step_seconds"] for row in rows if row["step"] > 1 and "step_seconds" in row]
    return Result(run, last["val_bits_per_byte"], last["step"], statistics.median(timed))
