"""Measure the speed of data preparation and of the data loader.

python -m benchmarks.data --data my.jsonl
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from benchmarks import REPOSITORY
from benchmarks.cli import heading, new_parser, numbers, say, table
from common.errors import UsageError, one_line_errors
from common.numbers import available_cores
from data.corpus import BUILTIN, find_files
from data.dataset import PackedDataset, endless_batches
from data.errors import DataError
from data.order import MicroBatchSampler
from data.shards import read_description
from data.tokenizer import TOKENIZER_FILE
from model import ConfigError

PROGRAM = "benchmarks.data"
BATCH_SIZE = 8  # sequences in a micro-batch


def main(argv: list[str] | None = None) -> None:
    with one_line_errors(PROGRAM, UsageError, ConfigError, OSError):
        args = parse_options(argv)
        find_files(args.data)  # report a wrong name before any work
        # Use the disk of prepared data, because /tmp may be in memory.
        out = Path("out").absolute()
        out.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix="benchmark-data-") as folder:
            tables = list(measure(args, Path(folder) / "packed"))
        print(heading(PROGRAM, argv), *tables, sep="\n\n", flush=True)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--data", default=BUILTIN, help="text, as for scripts.prepare_data")
    add("--loader_seq_lens", type=numbers, default="256,512,1024", help="lengths of sequences")
    add("--num_workers", type=numbers, default="0,2", help="values of --num_workers")
    text = "tokens per second of training, from its log"
    add("--model_tokens_per_second", type=int, default=3800, help=text)
    add("--seconds", type=int, default=2, help="seconds per measurement of the loader")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace, packed: Path) -> Iterator[str]:
    """Prepare the text into the new folder `packed`; yield a table for each part."""
    workers = available_cores()
    say("preparing the text")
    row = preparation_row(args.data, packed, workers)
    yield (
        f"Preparation with {workers} processes, including the start of Python and the training of "
        f"the tokenizer.\n\n{table([row])}"
    )

    rows = []
    for seq_len, num_workers in product(args.loader_seq_lens, args.num_workers):
        say(f"loader at {seq_len} tokens, --num_workers {num_workers}")
        speed = loader_speed(packed, seq_len, num_workers, args.seconds)
        trained = args.model_tokens_per_second
        rows.append(
            {
                "max_seq_len": seq_len,
                "num_workers": num_workers,
                "loader, tokens/s": f"{speed:,.0f}",
                "training, tokens/s": f"{trained:,.0f}",
                "loader / training": f"{speed / trained:,.0f} ×",
                "waiting for data, share of a step": f"{trained / (trained + speed):.3%}",
            }
        )
    yield (
        f"Loader alone, {BATCH_SIZE} sequences per batch; last column without read-ahead.\n\n"
        f"{table(rows)}"
    )


def preparation_row(source: str, out: Path, workers: int) -> dict[str, str]:
    """Run scripts.prepare_data, which writes into the folder `out`; return its row of the table.

    "tokenizer" is the time in seconds until the command wrote the tokenizer. MB are 10^6 bytes of
    UTF-8 text, without the JSON around it. Raises DataError if the command refused the text.
    """
    source = source if source == BUILTIN else os.path.abspath(source)
    command = [sys.executable, "-m", "scripts.prepare_data", "--data", source, "--out", str(out)]
    command += ["--segmentations", "1", "--workers", str(workers)]  # encode each document once
    started = time.time()
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    seconds = time.time() - started
    if ended.returncode:
        raise DataError(ended.stderr.split("prepare_data: error: ")[-1].strip())
    splits = read_description(out)["splits"].values()
    documents, n_bytes, tokens = (
        sum(split[key] for split in splits) for key in ("documents", "bytes", "tokens")
    )
    tokenizer = (out / TOKENIZER_FILE).stat().st_mtime - started
    return {
        "MB": f"{n_bytes / 1e6:.1f}",
        "documents": f"{documents:,}",
        "tokens": f"{tokens:,}",
        "seconds": f"{seconds:.1f}",
        "tokenizer": f"{tokenizer:.1f}",
        "MB/s": f"{n_bytes / 1e6 / seconds:.2f}",
        "MB/s per process": f"{n_bytes / 1e6 / seconds / workers:.2f}",
    }


def loader_speed(folder: Path, seq_len: int, num_workers: int, seconds: float) -> float:
    """Return the tokens/s of the training script's loader, without training. The clock
    starts after the first batch, when the workers are running."""
    train_set = PackedDataset(folder, "train", seq_len)
    batches = endless_batches(train_set, MicroBatchSampler(len(train_set), BATCH_SIZE), num_workers)
    next(batches)
    count, start = 0, time.perf_counter()
    while count == 0 or time.perf_counter() - start < seconds:
        next(batches)
        count += 1
    return count * BATCH_SIZE * seq_len / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
