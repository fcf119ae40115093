"""Turn text into a tokenizer and packed token shards, or conversations into shards of their own.

python -m scripts.prepare_data --data my.jsonl
python -m scripts.prepare_data --conversations chat.jsonl --tokenizer out/runs/NAME/tokenizer.model

Conversations are one JSON object per line, in the form of MiniMind, OpenAI, DeepSpeed-Chat or
Alpaca, see data/conversations.py.
"""

import argparse
import shlex
import time
from functools import partial
from pathlib import Path

from common.atomic import one_at_a_time
from common.cpu import available_cores
from common.errors import UsageError, one_line_errors, stop_in_order
from common.numbers import counted, size
from common.parser import OneLineParser
from common.progress import progress_bar
from data.conversations import SUFFIXES as CONVERSATION_SUFFIXES
from data.corpus import BUILTIN, SUFFIXES, TEXT_COLUMN, find_files, text_size
from data.packing import PackingOptions, prepare, suited_to
from data.prepared import default_out, find_prepared
from data.shards import CONVERSATIONS, TEXT

BY_SIZE = "default: by the size of the text"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m scripts.prepare_data",
        description=__doc__,
        allow_abbrev=False,  # other programs look for some of these flags in those they hand on
    )
    add = parser.add_argument
    kinds = f"{', '.join(SUFFIXES)} file, a folder of them, or '{BUILTIN}'"
    add("--data", help=f"{kinds} (default: {BUILTIN})")
    kinds = f"{', '.join(CONVERSATION_SUFFIXES)} file, a folder of them, or '{BUILTIN}'"
    add("--conversations", metavar="DATA", help=f"to learn to answer, in place of text: {kinds}")
    add("--out", type=Path, help="folder to write (default: out/data/ and the name of the data)")
    add("--vocab_size", type=int, help=f"pieces of the tokenizer ({BY_SIZE})")
    existing = "tokenizer.model (SentencePiece), tokenizer.json, or a folder with one, to use "
    existing += "instead of training one; conversations take their model's"
    add("--tokenizer", help=existing)
    add("--val_fraction", type=float, help=f"share of documents for validation ({BY_SIZE})")
    column = f"name of the text in .jsonl, .csv and .parquet (default: {TEXT_COLUMN})"
    add("--text_column", help=column)
    ways = "ways to cut each training document into pieces, all but the first at random"
    add("--segmentations", type=int, help=f"{ways} ({BY_SIZE})")
    add("--workers", type=int, default=available_cores(), help="encoding processes, one per core")
    skip = "count documents that cannot be read, and go on"
    add("--skip_bad_lines", action="store_true", help=skip)
    add("--overwrite", action="store_true", help="replace data prepared from other text")
    same = "take the data that is there if the text has not changed since"
    add("--reuse", action="store_true", help=same)
    more = "more of these flags in one word, as PREPARE_FLAGS and --prepare_flags have them"
    add("--flags", default="", metavar="WORDS", help=more)
    given = parser.parse_args(argv)
    try:
        words = shlex.split(given.flags)
    except ValueError as error:
        parser.error(f"--flags {given.flags!r}: {error}")
    also = parser.parse_args(words)
    for name in ("data", "conversations", "tokenizer", "out"):
        if None not in (getattr(given, name), getattr(also, name)):
            parser.error(f"--{name} is given already: leave it out of {given.flags!r}")
    args = parser.parse_args(words, given)
    if not 0 <= (args.val_fraction or 0) < 1:
        parser.error(f"--val_fraction must be at least 0 and below 1, not {args.val_fraction}")
    if args.workers < 1 or (args.segmentations is not None and args.segmentations < 1):
        parser.error("--segmentations and --workers must be at least 1")
    if args.conversations is not None:
        for name in ("data", "vocab_size", "text_column", "segmentations"):
            if getattr(args, name) is not None:
                parser.error(f"--{name} is for text, and does not go with --conversations")
        if args.tokenizer is None:
            parser.error("--conversations takes the tokenizer of its model: pass --tokenizer")
    args.data = args.conversations or args.data or BUILTIN
    args.kind = TEXT if args.conversations is None else CONVERSATIONS
    args.out = args.out or default_out(args.data, kind=args.kind)
    return args


def prepare_anew(args: argparse.Namespace, files: list[str], options: PackingOptions) -> None:
    """Prepare the files, and report the result."""
    start = time.perf_counter()
    # Of the built-in conversations' source, little is asked about.
    total = text_size(files) if options.kind == TEXT or args.data != BUILTIN else None
    with progress_bar(total, desc="encoding", unit="B", scale=True) as bar:
        description = prepare(files, args.out, options, bar.update)
    seconds = time.perf_counter() - start
    print(report(description, options, args.out, seconds))
    print(f"  by the size of the text: {', '.join(chosen_by_size(files, options)) or 'nothing'}")


def report(description: dict, options: PackingOptions, out: Path, seconds: float) -> str:
    """Describe both splits, and everything that was left out."""
    splits = description["splits"]
    ways = {"train": description["prepared_from"]["segmentations"], "val": 1}
    of_text = options.kind == TEXT
    kind, documents = ("text", "documents") if of_text else ("answers", CONVERSATIONS)
    n_bytes = sum(split["bytes"] // ways[name] for name, split in splits.items())
    speed = f"{size(n_bytes / seconds)}/s with {options.workers} processes"
    lines = [f"{out}: {size(n_bytes)} of {kind} in {seconds:.1f} s ({speed})"]
    for name, split in splits.items():
        n, word = counted(split["documents"] // ways[name], documents).split()
        line = f"  {name:5} {n:>9} {word:{len(documents)}} {split['tokens']:>13,} tokens"
        line += f", {split['answers']['tokens']:,} of them in answers" if "answers" in split else ""
        line += f", each document cut in {ways[name]} ways" if ways[name] > 1 else ""
        lines.append(line)
    tokens = sum(split.get("answers", split)["tokens"] for split in splits.values())
    per_token = sum(split["bytes"] for split in splits.values()) / tokens
    lines.append(f"  vocabulary {description['vocab_size']:,}, {per_token:.2f} bytes per token")
    if n_bad := description["bad_documents"]:
        bad = counted(n_bad, f"bad {documents}")
        lines.append(f"  skipped {bad}, the first: {description['first_bad_document']}")
    if description["prepared_from"]["val_fraction"] and not splits["val"]["documents"]:
        lines.append(f"  WARNING: no validation split: that takes two different {documents}")
    return "\n".join(lines)


def chosen_by_size(files: list[str], options: PackingOptions) -> list[str]:
    """Return the settings that the size of the text has chosen, and the flags that change them."""
    chosen, taken = suited_to(files), []
    if options.vocab_size is None and options.tokenizer is None:
        taken.append(f"a vocabulary of {chosen.vocab_size:,} at most (--vocab_size)")
    if options.val_fraction is None:
        taken.append(f"{options.share(files):.0%} for validation (--val_fraction)")
    if options.segmentations is None and chosen.segmentations > 1:
        taken.append(f"{chosen.segmentations} ways to cut a document into pieces (--segmentations)")
    if options.kind == TEXT and any(path.endswith((".txt", ".py")) for path in files):
        taken.append(f"long files cut into documents of {chosen.section_bytes // 1024} KiB")
    return taken


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("prepare_data", UsageError, OSError):
        args = parse_arguments(argv)
        of_text = args.kind == TEXT
        files = find_files(args.data, SUFFIXES if of_text else CONVERSATION_SUFFIXES)
        options = PackingOptions(
            kind=args.kind,
            vocab_size=args.vocab_size,
            val_fraction=args.val_fraction,
            workers=args.workers,
            skip_bad_lines=args.skip_bad_lines,
            tokenizer=args.tokenizer,
            text_column=args.text_column or TEXT_COLUMN,
            segmentations=args.segmentations if of_text else 1,
        )
        find = partial(
            find_prepared, args.out, files, options, reuse=args.reuse, overwrite=args.overwrite
        )
        if said := find():
            print(f"{args.out}: {said}")
            return
        with one_at_a_time(args.out):
            if said := find():  # another process has prepared it meanwhile
                print(f"{args.out}: {said}")
            else:
                prepare_anew(args, files, options)


if __name__ == "__main__":
    stop_in_order()
    main()
