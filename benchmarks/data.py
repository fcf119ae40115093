"""Speed and memory of the way from text to the model: preparation, loader, packing.

python -m benchmarks.data --data my.jsonl

Prints Markdown tables; what it is at goes to stderr. Nothing stays on the disk.
"""

import argparse
import json
import math
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

from benchmarks import data_padding
from benchmarks.data_loader import loader_speed, training_steps
from benchmarks.data_preparation import copies, prepare
from benchmarks.flags import output_file
from benchmarks.machine import cpu_name
from common.cpu import available_cores
from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from data.corpus import BUILTIN, find_files
from data.dataset import PackedDataset
from data.errors import DataError
from model import ConfigError

SHAPES = {
    "26m": "--dim 512 --n_layers 8 --n_heads 8",
    "preset": "--dim 192 --n_layers 4 --n_heads 4",  # run_accelerate.sh's where there is no GPU
}


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m benchmarks.data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def flag(name: str, default, help_text: str, **options) -> None:
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        help_text += "" if default is None else f" (default: {shown})"
        parser.add_argument(f"--{name}", default=default, help=help_text, **options)

    flag("data", BUILTIN, "text, as for scripts.prepare_data")
    flag("workers", available_cores(), "processes that prepare it", type=at_least(1))
    flag("repeat", [1, 4], "prepare it so many times over, a run for each", type=numbers(1))
    lens = [256, 512, 1024]
    flag("loader_seq_lens", lens, "sequence lengths to measure the loader at", type=numbers(2))
    flag("num_workers", [0, 2], "as for the training script, a run for each", type=numbers(0))
    flag("seq_len", 512, "sequence length to compare packing and padding at", type=at_least(2))
    flag("batch_size", 8, "sequences in a micro-batch", type=at_least(1))
    flag("shape", "26m", "model to train", choices=SHAPES)
    flag("steps", 6, "training steps to time", type=at_least(1))
    speed = "what training consumes, where that is known; without it, training is timed"
    flag("model_tokens_per_second", None, speed, type=float)
    flag("seconds", 2.0, "for how long to run the loader alone", type=float)
    flag("json", None, "a file for the numbers", type=output_file, metavar="FILE")
    args = parser.parse_args(argv)
    for name in ("model_tokens_per_second", "seconds"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name} must be positive and finite, not {value}")
    return args


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"whole numbers from {least} on, not {text!r}")
        return int(text)

    return parse


def numbers(least: int) -> Callable[[str], list[int]]:
    """A list with commas; what is named twice is measured once."""
    return lambda text: list(dict.fromkeys(map(at_least(least), text.split(","))))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[dict]]:
    """Everything, in a folder for what it writes: rows of "preparation", "loader", "padding"."""
    packed = folder / f"packed-{args.repeat[0]}"
    preparation = []
    for repeat in args.repeat:
        say(f"preparing the text, {repeat} times over")
        source = copies(args.data, repeat, folder / f"text-{repeat}")
        row = prepare(source, folder / f"packed-{repeat}", args.workers)
        preparation.append({"repeat": repeat} | row)
    for flag, lengths in (
        ("loader_seq_lens", args.loader_seq_lens),
        ("seq_len", [args.seq_len]),
    ):
        if not PackedDataset.fits(packed, "train", max(lengths)):
            raise UsageError(
                f"{args.data} does not make one sequence of {max(lengths)} tokens: use a smaller "
                f"--{flag}, or a larger first --repeat"
            )
    longest = max(*args.loader_seq_lens, args.seq_len)
    sequences = len(PackedDataset(packed, "train", longest))
    if sequences < args.batch_size:
        raise UsageError(
            f"--batch_size {args.batch_size} is more than the {sequences} sequences of {longest} "
            f"tokens that {args.data} makes"
        )
    trained = {}
    for seq_len in dict.fromkeys([*args.loader_seq_lens, args.seq_len]):
        if args.model_tokens_per_second is None:
            say(f"training on sequences of {seq_len}")
            workers = args.num_workers if seq_len in args.loader_seq_lens else []
            flags = [*SHAPES[args.shape].split(), "--batch_size", str(args.batch_size)]
            flags += ["--max_seq_len", str(seq_len)]
            trained[seq_len] = training_steps(
                packed, flags, args.steps, workers, padded=seq_len == args.seq_len
            )
    return {
        "preparation": preparation,
        "loader": [
            loader_row(args, packed, trained.get(seq_len, {}), seq_len, num_workers)
            for seq_len in args.loader_seq_lens
            for num_workers in args.num_workers
        ],
        "padding": padding_rows(args, packed, trained.get(args.seq_len, {})),
    }


def loader_row(
    args: argparse.Namespace, packed: Path, trained: dict, seq_len: int, num_workers: int
) -> dict:
    """Tokens/s of the loader alone against training's, and the share of a step that it costs.

    Where training was not timed, the share is what it would be if nothing were loaded ahead.
    """
    say(f"loader at {seq_len} tokens, --num_workers {num_workers}")
    settings = packed, seq_len, args.batch_size, num_workers, args.seconds
    cold = loader_speed(*settings, cold=True)
    warm = loader_speed(*settings, cold=False)
    if trained:
        steps = trained[num_workers]
        training = args.batch_size * seq_len / median(seconds for seconds, _ in steps)
        waiting = sum(waited for _, waited in steps) / sum(seconds for seconds, _ in steps)
    else:
        training = args.model_tokens_per_second
        waiting = training / (training + warm)
    return {
        "seq_len": seq_len,
        "num_workers": num_workers,
        "cold_tokens_per_second": cold,
        "tokens_per_second": warm,
        "training_tokens_per_second": training,
        "waiting_share": waiting,
        "waiting_measured": bool(trained),
    }


def padding_rows(args: argparse.Namespace, packed: Path, trained: dict) -> list[dict]:
    """Packing, padding to seq_len and padding to the longest: useful positions, per second too."""
    lengths = data_padding.document_lengths(packed)
    speeds = dict.fromkeys(("packed", "padded"), args.model_tokens_per_second)
    for way, width in (("packed", args.seq_len), ("padded", args.seq_len - 1)):
        if trained:
            speeds[way] = args.batch_size * width / median(seconds for seconds, _ in trained[way])
    padded = data_padding.padded(lengths, args.seq_len)
    longest = data_padding.padded_to_longest(lengths, args.seq_len, args.batch_size)
    rows = [
        {"way": "packed"} | data_padding.packed(lengths, args.seq_len),
        {"way": f"padded to {args.seq_len}"} | padded,
        {"way": f"padded to the longest of {args.batch_size}"} | longest,
    ]
    for row, speed in zip(rows, ("packed", "padded", "padded"), strict=True):
        row["useful_per_position"] = row["useful"] / row["positions"]
        row["lost_share"] = row["lost"] / int((lengths - 1).sum())
        row["positions_per_second"] = speeds[speed]
        row["useful_per_second"] = row["useful_per_position"] * speeds[speed]
    return rows


def say(what: str) -> None:
    print(f"benchmarks.data: {what}", file=sys.stderr, flush=True)


def machine() -> str:
    """Whose numbers these are: date, processor, GPU, versions."""
    packages = ("torch", "accelerate", "numpy", "sentencepiece")
    return ", ".join(
        [
            time.strftime("%Y-%m-%d"),
            cpu_name(),
            torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
            f"{platform.system()}, Python {platform.python_version()}",
            *(f"{name} {version(name)}" for name in packages),
        ]
    )


def report(head: dict, args: argparse.Namespace, results: dict) -> str:
    """The Markdown for docs/: machine, command, three tables and how they were made."""
    parts = [
        f"{head['machine']}.\n\n    {head['command']}",
        preparation_table(results["preparation"]),
        loader_table(args, results["loader"]),
        padding_table(args, results["padding"]),
    ]
    return "\n\n".join(parts)


def preparation_table(rows: list[dict]) -> str:
    titles = ["text", "MB", "documents", "bytes each", "tokens", "seconds", "tokenizer", "packing"]
    titles += ["MB/s", "MB/s per process", "MB per CPU second", "peak RAM", "sum of peaks"]
    lines = [
        [
            f"{row['repeat']} ×",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['documents']:,}",
            f"{row['bytes'] / row['documents']:,.0f}",
            f"{row['tokens']:,}",
            f"{row['seconds']:.1f}",
            f"{row['tokenizer_seconds']:.1f}",
            f"{row['packing_seconds']:.1f}",
            f"{row['mb_per_second']:.2f}",
            f"{row['mb_per_second_per_process']:.2f}",
            f"{row['mb_per_cpu_second']:.2f}",
            megabytes(row["peak_pss_bytes"]),
            megabytes(row["sum_of_peaks_bytes"]),
        ]
        for row in rows
    ]
    return (
        f"Preparation with {rows[0]['workers']} processes. The seconds hold all, the start of "
        "Python and the training of the tokenizer too. Peak RAM is the largest sum of all "
        "processes' Pss, looked at ten times a second; sum of peaks adds up each one's own, which "
        "need not coincide and count shared pages twice. Copies of a text add nothing to its "
        "tokenizer's training, which may then need less.\n\n" + table(titles, lines)
    )


def loader_table(args: argparse.Namespace, rows: list[dict]) -> str:
    titles = ["max_seq_len", "num_workers", "loader, tokens/s", "the same, shards not in memory"]
    titles += ["training, tokens/s", "loader / training", "waiting for data, share of a step"]
    lines = [
        [
            str(row["seq_len"]),
            str(row["num_workers"]),
            f"{row['tokens_per_second']:,.0f}",
            thousands(row["cold_tokens_per_second"]),
            f"{row['training_tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / row['training_tokens_per_second']:,.0f} ×",
            f"{row['waiting_share']:.3%}",
        ]
        for row in rows
    ]
    if rows[0]["waiting_measured"]:
        how = f"alone, and in {args.steps} steps of training the {args.shape} shape, where the "
        how += "share was measured"
    else:
        how = "alone, beside a speed of training that was given; the share is what it would be "
        how += "with nothing loaded ahead"
    return f"Loader, batches of {args.batch_size}, {how}.\n\n" + table(titles, lines)


def padding_table(args: argparse.Namespace, rows: list[dict]) -> str:
    titles = ["way", "useful tokens per position", "tokens of text lost", "training, positions/s"]
    titles += ["useful tokens/s", "against padding"]
    base = rows[1]["useful_per_second"]
    lines = [
        [
            row["way"],
            f"{row['useful_per_position']:.4f}",
            f"{row['lost']:,} ({row['lost_share']:.2%})",
            f"{row['positions_per_second']:,.0f}",
            f"{row['useful_per_second']:,.0f}",
            f"{row['useful_per_second'] / base:.2f} ×",
        ]
        for row in rows
    ]
    how = "taken as given, the same for all"
    if args.model_tokens_per_second is None:
        ratio = rows[0]["positions_per_second"] / rows[1]["positions_per_second"]
        how = f"measured on packed and padded batches in turn, {args.steps} steps each: a padded "
        how += f"position costs {ratio:.2f} times a packed one. Of batches padded to their longest "
        how += "it is taken to be the same"
    return (
        f"Packing against padding at max_seq_len {args.seq_len}. A position is useful if its "
        "target is a token or the end of a document; padding is not, nor the begin of the next "
        f"document. Speed {how}.\n\n" + table(titles, lines)
    )


def megabytes(n_bytes: int | None) -> str:
    return "n/a" if n_bytes is None else f"{n_bytes / 1e6:,.0f} MB"


def thousands(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.0f}"


def table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    try:
        with one_line_errors("benchmarks.data", UsageError, ConfigError, DataError, OSError):
            run(parse_arguments(argv), argv)
    except KeyboardInterrupt:
        sys.exit("stopped; nothing is left behind")


def run(args: argparse.Namespace, argv: list[str]) -> None:
    """Measure, print the tables, write the numbers."""
    find_files(args.data)  # wrong names are refused before the work
    head = {"machine": machine(), "command": "python -m benchmarks.data " + shlex.join(argv)}
    # On the disk where prepared data lives: /tmp may be in memory.
    out = Path("out").absolute()
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix="benchmark-data-") as folder:
        results = measure(args, Path(folder))
    print(report(head, args, results), flush=True)
    if args.json:
        args.json.write_text(json.dumps(head | results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
