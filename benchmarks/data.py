"""Speed and memory of the way from text to the model: preparation, loader, packing.

python -m benchmarks.data --data my.jsonl

Prints Markdown tables; what it is at goes to stderr. Nothing stays on the disk.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks import data_padding
from benchmarks.data_loader import loader_speed, training_steps
from benchmarks.data_padding import Positions
from benchmarks.data_preparation import Preparation, copies, prepare
from benchmarks.flags import at_least, numbers
from benchmarks.markdown import heading, table
from common.cpu import available_cores
from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from data.corpus import BUILTIN, find_files
from data.dataset import PackedDataset
from data.errors import DataError
from model import ConfigError

PROGRAM = "benchmarks.data"
BATCH_SIZE = 8  # sequences in a micro-batch
SHAPES = {
    "26m": "--dim 512 --n_layers 8 --n_heads 8",
    "preset": "--dim 192 --n_layers 4 --n_heads 4",  # run_accelerate.sh's where there is no GPU
}


def main(argv: list[str] | None = None) -> None:
    with one_line_errors(PROGRAM, UsageError, ConfigError, DataError, OSError):
        args = parse_arguments(argv)
        find_files(args.data)  # wrong names are refused before the work
        # On the disk where prepared data lives: /tmp may be in memory.
        out = Path("out").absolute()
        out.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix="benchmark-data-") as folder:
            tables = measure(args, Path(folder))
        print(heading(PROGRAM, argv), *tables, sep="\n\n", flush=True)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog=f"python -m {PROGRAM}", description=__doc__, allow_abbrev=False)
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


def measure(args: argparse.Namespace, folder: Path) -> list[str]:
    """The three tables; everything is written into the folder."""
    workers, preparations = available_cores(), {}
    for repeat in args.repeat:
        say(f"preparing the text, {repeat} times over")
        source = copies(args.data, repeat, folder / f"text-{repeat}")
        preparations[repeat] = prepare(source, folder / f"packed-{repeat}", workers)
    packed = folder / f"packed-{args.repeat[0]}"
    check_length(args, packed)
    settings = [(length, n) for length in args.loader_seq_lens for n in args.num_workers]
    compared = args.seq_len, args.num_workers[0]
    training = {
        setting: training_speed(args, packed, *setting)
        for setting in dict.fromkeys([*settings, compared])
    }
    loader = [loader_row(args, packed, *setting, *training[setting]) for setting in settings]
    speed, _ = training[compared]
    return [
        preparation_table(preparations, workers),
        loader_table(args, loader),
        padding_table(args.seq_len, data_padding.document_lengths(packed), speed),
    ]


def check_length(args: argparse.Namespace, packed: Path) -> None:
    """Raises UsageError: the text does not make one micro-batch of the longest sequences."""
    for flag, lengths in ("loader_seq_lens", args.loader_seq_lens), ("seq_len", [args.seq_len]):
        needed = max(lengths) * BATCH_SIZE
        if not PackedDataset.fits(packed, "train", needed):
            raise UsageError(
                f"{args.data} does not make {BATCH_SIZE} sequences of {max(lengths)} tokens: use "
                f"a smaller --{flag}, or a larger first --repeat"
            )


def training_speed(
    args: argparse.Namespace, packed: Path, seq_len: int, num_workers: int
) -> tuple[float, float | None]:
    """Tokens/s of training, and the share of its time in which it waits for data.

    As given by the flag, and then nothing is known of the share; or measured.
    """
    if args.model_tokens_per_second is not None:
        return args.model_tokens_per_second, None
    say(f"training on sequences of {seq_len}, --num_workers {num_workers}")
    flags = f"{SHAPES[args.shape]} --batch_size {BATCH_SIZE} --max_seq_len {seq_len}"
    words = [*flags.split(), "--num_workers", str(num_workers)]
    steps = training_steps(packed, words, args.steps)
    waited = sum(waited for _, waited in steps) / sum(seconds for seconds, _ in steps)
    return BATCH_SIZE * seq_len / median(seconds for seconds, _ in steps), waited


def loader_row(
    args: argparse.Namespace,
    packed: Path,
    seq_len: int,
    num_workers: int,
    training: float,
    waiting: float | None,
) -> list[str | int]:
    """The loader's tokens/s alone against training's, and the share of a step that it costs.

    Where training was not timed, the share is what it would be if nothing were loaded ahead.
    """
    say(f"loader at {seq_len} tokens, --num_workers {num_workers}")
    settings = packed, seq_len, BATCH_SIZE, num_workers, args.seconds
    cold = loader_speed(*settings, cold=True)
    warm = loader_speed(*settings, cold=False)
    if waiting is None:
        waiting = training / (training + warm)
    return [
        seq_len,
        num_workers,
        f"{warm:,.0f}",
        "n/a" if cold is None else f"{cold:,.0f}",
        f"{training:,.0f}",
        f"{warm / training:,.0f} ×",
        f"{waiting:.3%}",
    ]


def loader_table(args: argparse.Namespace, rows: list[list]) -> str:
    titles = ["max_seq_len", "num_workers", "loader, tokens/s", "the same, shards not in memory"]
    titles += ["training, tokens/s", "loader / training", "waiting for data, share of a step"]
    how = "beside a speed of training that was given; the share is what it would be with nothing "
    how += "loaded ahead"
    if args.model_tokens_per_second is None:
        how = f"and in {args.steps} steps of training the {args.shape} shape, where the share was "
        how += "measured"
    return f"Loader, batches of {BATCH_SIZE}, alone, {how}.\n\n" + table(titles, rows)


def preparation_table(preparations: dict[int, Preparation], workers: int) -> str:
    """Of preparations by how often the text was repeated."""
    titles = ["text", "MB", "documents", "bytes each", "tokens", "seconds", "tokenizer", "packing"]
    titles += ["MB/s", "MB/s per process", "MB per CPU second", "peak RAM", "sum of peaks"]
    rows = []
    for repeat, done in preparations.items():
        megabytes, peaks = done.bytes / 1e6, (done.peak_pss, done.sum_of_peaks)
        rows.append(
            [
                f"{repeat} ×",
                f"{megabytes:.1f}",
                f"{done.documents:,}",
                f"{done.bytes / done.documents:,.0f}",
                f"{done.tokens:,}",
                f"{done.seconds:.1f}",
                f"{done.tokenizer_seconds:.1f}",
                f"{done.packing_seconds:.1f}",
                f"{megabytes / done.seconds:.2f}",
                f"{megabytes / done.seconds / workers:.2f}",
                f"{megabytes / done.cpu_seconds:.2f}",
                *("n/a" if peak is None else f"{peak / 1e6:,.0f} MB" for peak in peaks),
            ]
        )
    return (
        f"Preparation with {workers} processes, the start of Python and the training of the "
        "tokenizer included, to which copies of a text add nothing. Peak RAM is the largest sum of "
        "all processes' Pss, looked at ten times a second; sum of peaks adds up each one's own.\n\n"
        + table(titles, rows)
    )


def padding_table(seq_len: int, lengths, speed: float) -> str:
    """Of documents of these lengths, trained at this speed, in positions per second."""
    ways: dict[str, Positions] = {
        "packed": data_padding.packed(lengths, seq_len),
        f"padded to {seq_len}": data_padding.padded(lengths, seq_len),
        f"padded to the longest of {BATCH_SIZE}": data_padding.padded_to_longest(
            lengths, seq_len, BATCH_SIZE
        ),
    }
    useful = {way: positions.useful / positions.computed for way, positions in ways.items()}
    rows = [
        [
            way,
            f"{useful[way]:.4f}",
            f"{positions.lost:,} ({positions.lost / int((lengths - 1).sum()):.2%})",
            f"{speed:,.0f}",
            f"{useful[way] * speed:,.0f}",
            f"{useful[way] / useful[f'padded to {seq_len}']:.2f} ×",
        ]
        for way, positions in ways.items()
    ]
    titles = ["way", "useful tokens per position", "tokens of text lost", "training, positions/s"]
    return (
        f"Packing against padding at max_seq_len {seq_len}. A position is useful if its target is "
        "a token or the end of a document. A position is taken to cost the same in all ways.\n\n"
        + table([*titles, "useful tokens/s", "against padding"], rows)
    )


def say(what: str) -> None:
    print(f"{PROGRAM}: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
