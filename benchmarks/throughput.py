"""Speed of this project's training step and its peers' on the same work, in one run.

    python -m benchmarks.throughput --sizes 26m --json out/throughput.json

Contenders take turns: A B C A B C and so on. On a machine whose speed drifts, single figures are
worth little, but two contenders' ratio within one round is worth something, and its median over
rounds more. The table is Markdown and goes into docs/performance.md as it is.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

import torch

from benchmarks.contenders import all_contenders, select
from benchmarks.flags import at_least, names, new_parser
from benchmarks.markdown import heading
from benchmarks.report import NOTE, SizeReport, size_table
from benchmarks.session import Session
from benchmarks.work import SIZES
from common.errors import UsageError, one_line_errors, stop_in_order

PROGRAM = "benchmarks.throughput"


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    with one_line_errors(PROGRAM, UsageError):
        run(parse_options(argv), argv)


def build_parser(n_gpus: int) -> argparse.ArgumentParser:
    parser = new_parser(PROGRAM, __doc__)
    add, number = parser.add_argument, at_least(1)
    sizes = "26m,104m,360m" if n_gpus else "26m,104m"
    add("--sizes", type=names(SIZES), default=sizes, help=f"of {', '.join(SIZES)}")
    add("--contenders", default="all", help="names or groups: all, ours, peers, compiled, ...")
    add("--rounds", type=number, default=5, help="turns of each contender")
    add("--steps", type=number, default=10 if n_gpus else 3, help="steps per turn")
    add("--warmup_steps", type=at_least(0), default=3, help="steps before the first turn")
    add("--batch_size", type=number, help="sequences per micro-batch (default: the size's)")
    add("--seq_len", type=number, help="tokens per sequence (default: the size's)")
    add("--accumulation_steps", type=number, default=1, help="micro-batches per step")
    add("--processes", type=number, default=n_gpus or 1, help="of DDP and ZeRO")
    text = "use PyTorch's compile cache and not an empty one: first steps are no first run's"
    add("--keep_compile_cache", action="store_true", help=text)
    add("--trace", type=Path, metavar="FOLDER", help="leave a trace of one step of each there")
    add("--json", type=Path, metavar="FILE", help="write every number there")
    return parser


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """The flags, checked, with the chosen Contenders, and `works`, a Work by size.

    Raises:
        UsageError: a value that cannot work.
    """
    n_gpus = torch.cuda.device_count()
    options = build_parser(n_gpus).parse_args(argv)
    if 0 < n_gpus < options.processes:
        raise UsageError(f"--processes {options.processes} is more than the {n_gpus} GPUs")
    everybody = all_contenders(options.processes, n_gpus > 0)
    options.contenders = select(everybody, options.contenders)
    shape = ("batch_size", "seq_len", "accumulation_steps")
    given = {name: value for name in shape if (value := getattr(options, name)) is not None}
    options.works = {size: dataclasses.replace(SIZES[size], **given) for size in options.sizes}
    try:
        if options.json:
            options.json.open("a").close()
    except OSError as error:
        raise UsageError(f"--json: no file can be written at {options.json}") from error
    if options.trace and not options.trace.is_dir():
        raise UsageError(f"--trace: there is no folder {options.trace}")
    return options


def run(options: argparse.Namespace, argv: list[str] | None) -> None:
    """Measure every size, print its table, and write the file after each.

    Who is stopped before the end, by Ctrl-C or SIGTERM, has the rounds that were played.
    """
    reports: list[SizeReport] = []
    print(f"{heading(PROGRAM, argv)}\n\n{NOTE}\n", flush=True)
    for size, work in options.works.items():
        with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
            session = Session(size, work, options, Path(folder))
            try:
                session.measure()
            finally:
                session.close()
                reports.append(session.report)
                print(size_table(session.report), flush=True)
                if options.json:
                    numbers = [dataclasses.asdict(report) for report in reports]
                    options.json.write_text(json.dumps(numbers, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
