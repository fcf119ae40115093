"""Speed and memory of the way from text to the model: preparation, loader, packing.

python -m benchmarks.data --data my.jsonl

Prints Markdown tables; what it is at goes to stderr. Nothing stays on the disk.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from benchmarks.data_loader import Training, loader_row, train_for_a_while
from benchmarks.data_padding import padding_table
from benchmarks.data_preparation import copies, preparation_row
from benchmarks.flags import at_least, new_parser, numbers
from benchmarks.markdown import heading, table
from common.cpu import available_cores
from common.errors import UsageError, one_line_errors
from data.corpus import BUILTIN, find_files
from data.dataset import PackedDataset
from model import ConfigError

PROGRAM = "benchmarks.data"
BATCH_SIZE = 8  # sequences in a micro-batch
SHAPES = {
    "26m": "--dim 512 --n_layers 8 --n_heads 8",
    "preset": "--dim 192 --n_layers 4 --n_heads 4",  # run_accelerate.sh's where there is no GPU
}


def main(argv: list[str] | None = None) -> None:
    with one_line_errors(PROGRAM, UsageError, ConfigError, OSError):
        args = parse_options(argv)
        find_files(args.data)  # wrong names are refused before the work
        # On the disk where prepared data lives: /tmp may be in memory.
        out = Path("out").absolute()
        out.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix="benchmark-data-") as folder:
            tables = list(measure(args, Path(folder)))
        print(heading(PROGRAM, argv), *tables, sep="\n\n", flush=True)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--data", default=BUILTIN, help="text, as for scripts.prepare_data")
    text = "prepare it so many times over, a run for each"
    add("--repeat", type=numbers(1), default="1,4", help=text)
    text = "sequence lengths to measure the loader at"
    add("--loader_seq_lens", type=numbers(2), default="256,512,1024", help=text)
    text = "as for the training script, a run for each"
    add("--num_workers", type=numbers(0), default="0,2", help=text)
    text = "sequence length to compare packing and padding at"
    add("--seq_len", type=at_least(2), default=512, help=text)
    add("--shape", choices=SHAPES, default="26m", help="model to train")
    add("--steps", type=at_least(1), default=6, help="training steps to time")
    text = "what training consumes, where that is known; without it, training is timed"
    add("--model_tokens_per_second", type=at_least(1), help=text)
    add("--seconds", type=at_least(1), default=2, help="for how long to run the loader alone")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The three tables; everything is written into the folder."""
    rows, workers = [], available_cores()
    for repeat in args.repeat:
        say(f"preparing the text, {repeat} times over")
        source = copies(args.data, repeat, folder / f"text-{repeat}")
        row = preparation_row(source, folder / f"packed-{repeat}", workers)
        rows.append({"text": f"{repeat} ×"} | row)
    yield (
        f"Preparation with {workers} processes, the start of Python and the training of the "
        "tokenizer included, to which copies of a text add nothing. Peak RAM is the largest sum of "
        "all processes' Pss, looked at ten times a second; sum of peaks adds up each one's own.\n\n"
        + table(rows)
    )

    packed = folder / f"packed-{args.repeat[0]}"
    for seq_len in [*args.loader_seq_lens, args.seq_len]:
        PackedDataset(packed, "train", seq_len)  # a text that is too short is refused now
    rows, trained = [], {}
    for seq_len, num_workers in product(args.loader_seq_lens, args.num_workers):
        training = train(args, packed, seq_len, num_workers)
        trained.setdefault(seq_len, training)
        say(f"loader at {seq_len} tokens, --num_workers {num_workers}")
        rows.append(loader_row(packed, BATCH_SIZE, seq_len, num_workers, args.seconds, training))
    yield (
        f"Loader, batches of {BATCH_SIZE}, alone. Where the speed of training was given, the share "
        "is what it would be with nothing loaded ahead.\n\n" + table(rows)
    )

    training = trained.get(args.seq_len) or train(args, packed, args.seq_len, num_workers=0)
    yield padding_table(packed, args.seq_len, BATCH_SIZE, training.tokens_per_second)


def train(args: argparse.Namespace, packed: Path, seq_len: int, num_workers: int) -> Training:
    """As the flags say, or what they say of it."""
    if args.model_tokens_per_second is not None:
        return Training(args.model_tokens_per_second)
    say(f"training on sequences of {seq_len}, --num_workers {num_workers}")
    flags = f"{SHAPES[args.shape]} --batch_size {BATCH_SIZE} --max_seq_len {seq_len}"
    return train_for_a_while(packed, f"{flags} --num_workers {num_workers}".split(), args.steps)


def say(what: str) -> None:
    print(f"{PROGRAM}: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
