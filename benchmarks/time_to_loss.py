"""How long a challenger takes to the validation loss of a tuned AdamW run.

    python -m benchmarks.time_to_loss --data out/data/builtin

AdamW's learning rate is chosen first, as the best of several at the end of the full schedule. Then
both train with every seed, in turns: AdamW for --steps, the challenger for --share of them, on its
own schedule. All runs are real ones of train_pretrain_accelerate.py with the same model, data,
batch and order; finished ones are kept, and not run again with the same data and flags.
"""

import argparse
import hashlib
import json
import math
import shlex
import signal
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from benchmarks.flags import output_file, training_flags
from benchmarks.machine import cpu_name, versions
from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from data.errors import DataError
from data.shards import DESCRIPTION_FILE, read_description
from training.arguments import parse_arguments

PROGRAM = "benchmarks.time_to_loss"
OUT = Path("out/benchmarks/time_to_loss")
PATIENCE_SECONDS = 30  # for a run that was told to stop
# The model of run_accelerate.sh on a CPU, and 8,192 tokens per step.
MODEL = (
    "--dim 192 --n_layers 4 --n_heads 4 --max_seq_len 256 --batch_size 32 --accumulation_steps 1"
)
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

    name: str
    losses: dict[int, float] = field(default_factory=dict)  # step → validation loss
    step_seconds: float = math.nan  # median over the log intervals, validation left out
    tokens_per_step: int = 0

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


def main(argv: list[str] | None = None) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # What a shell starts in the background is born deaf to SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with one_line_errors(PROGRAM, UsageError, DataError):
            run(parse_options(argv), argv)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")


def run(options: argparse.Namespace, argv: list[str] | None) -> None:
    """Compare on every data set, print the tables, write the figures."""
    for data in options.data:  # one that is missing is said before the first run
        read_description(data)
    tables = [compare(Path(data), options) for data in options.data]
    print(header(argv), *(table for table, _ in tables), sep="\n\n")
    if options.json:
        values = {data: value for data, (_, value) in zip(options.data, tables, strict=True)}
        options.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """The flags, checked before the first run.

    Raises:
        UsageError: a value that cannot work.
    """
    parser = OneLineParser(prog=PROGRAM, description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--data", nargs="+", default=["out/data/builtin"], help="folders of packed data")
    add("--steps", type=int, default=200, help="AdamW's schedule (default: 200)")
    add("--share", type=float, default=0.34, help="the challenger's schedule in AdamW's steps")
    rates = [1e-3, 2e-3, 4e-3, 8e-3]
    add("--learning_rates", nargs="+", type=float, default=rates, help="those tried for AdamW")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3], help="(default: 1 2 3)")
    add("--challenger", default=CHALLENGER, help="its flags, as one string")
    add("--model", default=MODEL, help="flags of model and batch, as one string")
    add("--eval_interval", type=int, default=5, help="the challenger's validations, in steps")
    add("--out", type=Path, default=OUT, help=f"where the runs are kept (default: {OUT})")
    add("--json", type=output_file, metavar="FILE", help="write all figures to this file")
    options = parser.parse_args(argv)
    for name, holds in (
        ("steps", options.steps >= 1),
        ("eval_interval", options.eval_interval >= 1),
        ("share", 0 < options.share <= 1),
    ):
        if not holds:
            raise UsageError(f"--{name} cannot be {getattr(options, name)}")
    if int(options.share * options.steps) < 2:  # the first one compiles and is not counted
        raise UsageError(
            f"--share {options.share} of --steps {options.steps} leaves the challenger less than "
            "the two steps that it needs"
        )
    for name in ("model", "challenger"):
        try:
            parse_arguments(training_flags(getattr(options, name)))
        except ValueError as error:
            raise UsageError(f"--{name}: {error}") from error
    return options


def compare(data: Path, options) -> tuple[str, dict]:
    """The table of one data set, and the figures in it."""
    full, short = options.steps, int(options.share * options.steps)

    folder = runs_folder(data, options)

    def adamw(rate: float, seed: int) -> Result:
        flags = f"--optimizer adamw --learning_rate {rate} --max_steps {full} --eval_interval 0"
        return train(f"adamw-{rate:g}-{full}-seed{seed}", data, folder, flags, seed, options.model)

    tried = {rate: adamw(rate, options.seeds[0]).final for rate in options.learning_rates}
    best = min(tried, key=tried.get)
    races = []
    for seed in options.seeds:
        baseline = adamw(best, seed)
        flags = f"--learning_rate {best} {options.challenger} --max_steps {short}"
        flags += f" --eval_interval {options.eval_interval}"
        name = f"challenger-{mark(flags)}-{short}-seed{seed}"
        challenger = train(name, data, folder, flags, seed, options.model)
        races.append(Race(seed, baseline, challenger))
    values = {
        "learning_rates": {f"{rate:g}": loss for rate, loss in tried.items()},
        "races": [asdict(race) for race in races],
    }
    return table(data, tried, best, races, options), values


def runs_folder(data: Path, options: argparse.Namespace) -> Path:
    """Where runs are kept that have all in common but what their names say: the text, the model,
    and what every run is told."""
    description = (data / DESCRIPTION_FILE).read_text(encoding="utf-8")
    common = mark(str(data.resolve()), description, options.model, QUIET)
    return options.out / f"{data.resolve().name}-{common}"


def mark(*texts: str) -> str:
    """Eight characters, the same for the same texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:8]


def train(name: str, data: Path, folder: Path, flags: str, seed: int, model: str) -> Result:
    """One run, unless it has been made before.

    Raises:
        UsageError: the training script failed.
    """
    metrics = folder / name / "metrics.jsonl"
    if not (folder / name / "weights").exists():
        print(f"{data}: {name} ...", file=sys.stderr, flush=True)
        words = [sys.executable, "train_pretrain_accelerate.py", *shlex.split(model)]
        words += [*shlex.split(QUIET), *shlex.split(flags), "--seed", str(seed)]
        words += ["--data", str(data), "--out_dir", str(folder), "--run_name", name]
        code, said = run_to_its_end([*words, "--resume", "auto"])
        if code or not (folder / name / "weights").exists():
            raise UsageError(f"{name} failed: {''.join(said.strip().splitlines()[-1:])}")
    return read(name, metrics)


def run_to_its_end(command: list[str]) -> tuple[int, str]:
    """Exit code and output of a process, which does not outlive an interruption of this one."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output = process.communicate()[0]
    finally:
        process.terminate()  # training saves and ends; what has ended is left alone
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return process.returncode, output.decode(errors="replace")


def read(name: str, metrics: Path) -> Result:
    result, seconds = Result(name), []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        if "val_loss" in values:
            result.losses[values["step"]] = values["val_loss"]
        elif values.get("step", 0) > 1 and "step_seconds" in values:  # the first one compiles
            seconds.append(values["step_seconds"])
            result.tokens_per_step = values["tokens"] // values["step"]
    if not seconds:
        raise UsageError(f"{metrics}: no step after the first was logged")
    result.step_seconds = statistics.median(seconds)
    return result


def header(argv: list[str] | None) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    command = shlex.join(sys.argv[1:] if argv is None else argv)
    return (
        f"## Time to loss, {date.today()}\n\n{cpu_name()}. {packages}.\n\n"
        f"    python -m {PROGRAM} {command}"
    )


def table(data: Path, tried: dict, best: float, races: list[Race], options) -> str:
    rates = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in tried.items())
    lines = [
        f"### {data.name}: `{options.challenger}` against AdamW",
        f"Model and batch: `{options.model}`. AdamW's validation loss after {options.steps} steps "
        f"by learning rate: {rates}; {best:g} is used. Seconds are steps times the median "
        "step of the run, without validation and compilation.",
        "",
        "| seed | AdamW's final loss | its seconds | challenger: steps to it | tokens | seconds | "
        "share of steps | time per step | share of time | challenger's final loss |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for race in races:
        total = max(race.adamw.losses) * race.adamw.step_seconds
        cells = [race.seed, f"{race.adamw.final:.4f}", f"{total:.1f}"]
        if race.steps is None:
            cells += [f"not in {max(race.challenger.losses)}", "", "", "", f"{race.step_ratio:.3f}"]
            cells += [""]
        else:
            cells += [
                race.steps,
                f"{race.steps * race.challenger.tokens_per_step:,}",
                f"{race.steps * race.challenger.step_seconds:.1f}",
                f"{race.share_of_steps:.1%}",
                f"{race.step_ratio:.3f}",
                f"{race.share_of_time:.1%}",
            ]
        lines.append("| " + " | ".join(map(str, [*cells, f"{race.challenger.final:.4f}"])) + " |")
    shares = [race.share_of_time for race in races]
    if None not in shares:
        ratio = statistics.median(race.step_ratio for race in races)
        lines += [
            "",
            f"**{data.name}: {max(shares):.1%} of AdamW's time in the worst of {len(races)} seeds, "
            f"{statistics.median(shares):.1%} in the median; a step takes {ratio:.3f} as long**",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
