"""Speed of this project's training step and its peers' on the same work, in one run.

    python -m benchmarks.throughput --sizes 26m --json out/throughput.json

Contenders take turns: A B C A B C and so on. On a machine whose speed drifts, single figures are
worth little, but two contenders' ratio within one round is worth something, and its median over
rounds more. The table is Markdown and goes into docs/performance.md as it is.
"""

import argparse
import dataclasses
import json
import shlex
import signal
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.contenders import ALLOCATORS, all_contenders, select
from benchmarks.flags import output_file
from benchmarks.ours import check_extra
from benchmarks.report import NOTE, size_json, size_table
from benchmarks.session import Plan, Session
from benchmarks.team import TeamError
from benchmarks.work import DTYPES, SIZES
from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from model import ConfigError

PROGRAM = "python -m benchmarks.throughput"


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # What a shell starts in the background is born deaf to SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with one_line_errors("benchmarks.throughput", UsageError, ConfigError, TeamError):
            run(parse_options(argv), argv)
    except KeyboardInterrupt:
        sys.exit("stopped; all workers have been ended")


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog=PROGRAM, description=__doc__.split("\n")[0], allow_abbrev=False)
    has_gpu = torch.cuda.is_available()
    sizes = "26m,104m,360m" if has_gpu else "26m,104m"
    add = parser.add_argument
    add("--sizes", default=sizes, help=f"of {', '.join(SIZES)} (default: {sizes})")
    add("--contenders", default="all", help="names or groups: all, ours, peers, compiled, ...")
    add("--baseline", help="contender that the others are compared with (default: ours)")
    add("--rounds", type=int, default=5, help="turns of each contender (default: 5)")
    steps = 10 if has_gpu else 3
    add("--steps", type=int, default=steps, help=f"steps per turn (default: {steps})")
    add("--warmup_steps", type=int, default=3, help="steps before the first turn (default: 3)")
    add("--batch_size", type=int, help="sequences per micro-batch (default: the size's)")
    add("--seq_len", type=int, help="tokens per sequence (default: the size's)")
    add("--accumulation_steps", type=int, default=1, help="micro-batches per step (default: 1)")
    processes = max(1, torch.cuda.device_count())
    add(
        "--processes", type=int, default=processes, help="of DDP and ZeRO (default: all GPUs, or 1)"
    )
    add("--dtype", default="bfloat16", choices=DTYPES, help="precision (default: bfloat16)")
    text = "allocator settings of the peers on a CPU: their own, ours, or both (default: both)"
    add("--allocator", default="both", choices=ALLOCATORS, help=text)
    text = "more flags of the training script for ours, as --ours_flags='...'"
    add("--ours_flags", default="", help=text)
    text = (
        "use PyTorch's compile cache and not an empty one: first steps are no longer a first run's"
    )
    add("--keep_compile_cache", action="store_true", help=text)
    add("--json", type=output_file, metavar="FILE", help="write every number there")
    return parser


def parse_options(argv: list[str]) -> argparse.Namespace:
    """The flags, checked; `works` (size → Work) and `plan` are added.

    Raises:
        UsageError, ConfigError: a value that cannot work.
    """
    options = build_parser().parse_args(argv)
    numbers = ("rounds", "steps", "batch_size", "seq_len", "accumulation_steps", "processes")
    for name in numbers:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, not {value}")
    if options.warmup_steps < 0:
        raise UsageError(f"--warmup_steps must be at least 0, not {options.warmup_steps}")
    for name in ("sizes", "contenders"):
        if not split(getattr(options, name)):
            raise UsageError(f"--{name} names none")
    options.works = {}
    for size in split(options.sizes):
        if size not in SIZES:
            raise UsageError(f"--sizes: {size!r} is none of {', '.join(SIZES)}")
        given = {name: getattr(options, name) for name in ("batch_size", "seq_len")}
        given = {name: value for name, value in given.items() if value is not None}
        given |= {"accumulation_steps": options.accumulation_steps, "dtype": options.dtype}
        options.works[size] = dataclasses.replace(SIZES[size], **given)
        try:
            check_extra(options.works[size], options.ours_flags)
        except ValueError as error:
            raise UsageError(f"--ours_flags: {error}") from error
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    everybody = all_contenders(options.processes, n_gpus > 0, options.allocator)
    chosen = select(everybody, split(options.contenders))
    names = [contender.name for contender in chosen]
    if options.baseline and options.baseline not in names:
        raise UsageError(f"--baseline: {options.baseline!r} is none of {', '.join(names)}")
    options.plan = Plan(
        contenders=chosen,
        baseline=options.baseline,
        rounds=options.rounds,
        steps=options.steps,
        warmup_steps=options.warmup_steps,
        our_flags=options.ours_flags,
        fresh_compile=not options.keep_compile_cache,
        n_gpus=n_gpus,
    )
    return options


def split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def run(options: argparse.Namespace, argv: list[str]) -> None:
    """Measure every size, print its table, and write the file after each.

    Who is stopped before the end, by Ctrl-C or SIGTERM, has the rounds that were played.
    """
    about = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": f"{PROGRAM} {shlex.join(argv)}".strip(),
        "cpu": machine.cpu_name(),
        "versions": machine.versions(),
        "sizes": [],
    }
    for size, work in options.works.items():
        with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
            session = Session(size, work, options.plan, Path(folder))
            try:
                session.measure()
            finally:
                session.close()
                if session.measured_something:
                    publish(session, about, options)


def publish(session: Session, about: dict, options: argparse.Namespace) -> None:
    """Print one size, and write all that have been measured so far."""
    report = session.report()
    if not about["sizes"]:
        about |= session.device
        print(header(about, options), flush=True)
    about["sizes"].append(size_json(report))
    if options.json:
        options.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    print(size_table(report), flush=True)


def header(about: dict, options: argparse.Namespace) -> str:
    """What was run where, and how the tables are to be read."""
    names = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    on_gpu = about["device"] == "cuda"
    where = f"{about['device_name']}; {about['cpu']}" if on_gpu else about["cpu"]
    kept = options.keep_compile_cache
    note = NOTE.format(
        memory="of PyTorch's GPU allocator" if on_gpu else "resident, libraries included",
        compilation="compilation with a cache of earlier runs, " if kept else "compilation, ",
    )
    flags = f" Ours runs with {options.ours_flags}." if options.ours_flags else ""
    return (
        f"## Throughput, {about['date'][:10]}\n\n"
        f"{where}, {about['threads']} threads. {names}. {options.rounds} rounds of "
        f"{options.steps} steps.{flags} {note}\n\n    {about['command']}\n"
    )


if __name__ == "__main__":
    main()
