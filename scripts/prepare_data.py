"""Turn text into a tokenizer and packed token shards.

python -m scripts.prepare_data --data my.jsonl
"""

import argparse
import hashlib
import os
import time
from pathlib import Path

from common.cpu import available_cores
from common.errors import UsageError, one_line_errors
from common.numbers import counted, size
from common.parser import OneLineParser
from common.progress import progress_bar
from data.corpus import BUILTIN, SECTION_BYTES, SUFFIXES, find_files
from data.packing import DEFAULT_VOCAB_SIZE, PackingOptions, prepare
from data.prepared import find_prepared


def default_out(data: str, flags: str = "") -> Path:
    """out/data/NAME, NAME being the file's or folder's own without its suffix.

    Args:
        flags: how it is prepared. Runs that were trained on the same text prepared in another way
            keep their data: NAME has a hash of the flags at its end.
    """
    name = Path(data).resolve().name if data != BUILTIN else BUILTIN
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        name = name.removesuffix(suffix)
    if words := flags.split():
        name += "-" + hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]
    return Path("out/data") / name


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m scripts.prepare_data", description=__doc__)
    add = parser.add_argument
    text = f"{', '.join(SUFFIXES)} file, a folder of them, or '{BUILTIN}'"
    add("--data", default=BUILTIN, help=text)
    where = "folder to write (default: out/data/ and the name of the data)"
    add("--out", type=Path, help=where)
    pieces = f"pieces of the tokenizer (default: {DEFAULT_VOCAB_SIZE}, fewer for a short text)"
    add("--vocab_size", type=int, help=pieces)
    add("--tokenizer", help="a SentencePiece model to use instead of training one")
    add("--val_fraction", type=float, default=0.02, help="share of documents for validation")
    per_core = "encoding processes, one per core"
    add("--workers", type=int, default=available_cores(), help=per_core)
    skip = "count documents that cannot be read, go on"
    add("--skip_bad_lines", action="store_true", help=skip)
    add("--overwrite", action="store_true", help="replace data prepared from other text")
    same = "take what is there if the text has not changed since"
    add("--reuse", action="store_true", help=same)
    args = parser.parse_args(argv)
    if not 0 <= args.val_fraction < 1:
        parser.error(f"--val_fraction must be at least 0 and below 1, not {args.val_fraction}")
    if args.workers < 1:
        parser.error(f"--workers must be at least 1, not {args.workers}")
    args.out = args.out or default_out(args.data)
    return args


def report(description: dict, out: Path, seconds: float, workers: int) -> str:
    splits = description["splits"]
    n_bytes = sum(split["bytes"] for split in splits.values())
    tokens = sum(split["tokens"] for split in splits.values())
    lines = [
        f"{out}: {size(n_bytes)} of text in {seconds:.1f} s "
        f"({size(n_bytes / seconds)}/s with {workers} processes)"
    ]
    for name, split in splits.items():
        documents, word = counted(split["documents"], "documents").split()
        lines.append(f"  {name:5} {documents:>9} {word:9} {split['tokens']:>13,} tokens")
    lines.append(
        f"  vocabulary {description['vocab_size']:,}, {n_bytes / tokens:.2f} bytes per token"
    )
    if description["bad_documents"]:
        lines.append(
            f"  skipped {counted(description['bad_documents'], 'bad documents')}, the first: "
            f"{description['first_bad_document']}"
        )
    if description["prepared_from"]["val_fraction"] and not splits["val"]["documents"]:
        lines.append(
            "  WARNING: no validation document: that takes two different documents at least; "
            f"a .txt under {SECTION_BYTES // 1024} KiB is one document"
        )
    return "\n".join(lines)


def describe_folder(folder: Path, files: list[str]) -> str:
    """How many files below it were read, and how many were not."""
    left_out = sum(path.is_file() for path in folder.rglob("*")) - len(files)
    read = f"{counted(len(files), 'files')} read ({', '.join(SUFFIXES)})"
    return f"{folder}: {read}, {left_out:,} left out"


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("prepare_data", UsageError, OSError):
        args = parse_arguments(argv)
        files = find_files(args.data)
        options = PackingOptions(
            vocab_size=args.vocab_size,
            val_fraction=args.val_fraction,
            workers=args.workers,
            skip_bad_lines=args.skip_bad_lines,
            tokenizer=args.tokenizer,
        )
        said = find_prepared(args.out, files, options, reuse=args.reuse, overwrite=args.overwrite)
        if said:
            print(f"{args.out}: {said}")
            return
        total = sum(map(os.path.getsize, files))
        packed = any(path.endswith(".gz") for path in files)
        start = time.perf_counter()
        with progress_bar(None if packed else total, desc="encoding", unit="B", scale=True) as bar:
            description = prepare(files, args.out, options, bar.update)
        if args.data != BUILTIN and os.path.isdir(args.data):
            print(describe_folder(Path(args.data), files))
        print(report(description, args.out, time.perf_counter() - start, args.workers))


if __name__ == "__main__":
    main()
