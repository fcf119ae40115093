"""Turn text into a tokenizer and packed token shards, or conversations into shards of their own.

python -m scripts.prepare_data --data my.jsonl
python -m scripts.prepare_data --conversations chat.jsonl --tokenizer out/runs/NAME/tokenizer.model

Conversations are one JSON object per line, in the form of MiniMind, OpenAI, DeepSpeed-Chat or
Alpaca, see data/conversations.py.
"""

import argparse
import os
import time
from pathlib import Path

from common.atomic import one_at_a_time
from common.cpu import available_cores
from common.errors import UsageError, one_line_errors, stop_in_order
from common.numbers import counted, size
from common.parser import OneLineParser
from common.progress import progress_bar
from data.conversation_packing import ConversationOptions, first_share
from data.conversations import SUFFIXES as CONVERSATION_SUFFIXES
from data.corpus import (
    BUILTIN,
    SUFFIXES,
    TEXT_COLUMN,
    bytes_to_read,
    find_files,
    require_columns,
    text_size,
)
from data.packing import PackingOptions, prepare
from data.prepared import default_out, find_prepared
from data.shards import CONVERSATIONS, TEXT
from data.sizes import BY_SIZE, suited_to


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m scripts.prepare_data",
        description=__doc__,
        allow_abbrev=False,  # other programs look for some of these flags in those they hand on
    )
    add = parser.add_argument
    text = f"{', '.join(SUFFIXES)} file, a folder of them, or '{BUILTIN}'"
    add("--data", help=f"{text} (default: {BUILTIN})")
    text = f"{', '.join(CONVERSATION_SUFFIXES)} file, a folder of them, or '{BUILTIN}'"
    add(
        "--conversations", metavar="DATA", help=f"to learn to answer from, in place of text: {text}"
    )
    stages = "shares of stages of training, as in 2,4,4: of the conversations the first is taken"
    add("--data_split", metavar="SHARES", help=f"{stages}, by hash (default: all)")
    where = "folder to write (default: out/data/ and the name of the data)"
    add("--out", type=Path, help=where)
    least, most = BY_SIZE[0], BY_SIZE[-1]
    ends = f"default: by the size of the text, {least.vocab_size} to {most.vocab_size}"
    add("--vocab_size", type=int, help=f"pieces of the tokenizer ({ends})")
    existing = "file to use instead of training one: tokenizer.model (SentencePiece) or "
    existing += "tokenizer.json; or a folder with it, of a run or from Hugging Face; conversations "
    existing += "take their model's"
    add("--tokenizer", help=existing)
    ends = f"default: by the size of the text, {least.val_fraction:g} to {most.val_fraction:g}"
    add("--val_fraction", type=float, help=f"share of documents for validation ({ends})")
    column = f"name of the text in .jsonl, .csv and .parquet (default: {TEXT_COLUMN})"
    add("--text_column", help=column)
    least, most = BY_SIZE[-1], BY_SIZE[0]
    ends = f"default: by the size of the text, {least.segmentations} or {most.segmentations}"
    ways = f"ways to cut each training document into pieces, at random but for the first ({ends})"
    add("--segmentations", type=int, help=ways)
    per_core = "encoding processes, one per core"
    add("--workers", type=int, default=available_cores(), help=per_core)
    skip = "count documents that cannot be read, go on"
    add("--skip_bad_lines", action="store_true", help=skip)
    add("--overwrite", action="store_true", help="replace data prepared from other text")
    same = "take what is there if the text has not changed since"
    add("--reuse", action="store_true", help=same)
    args = parser.parse_args(argv)
    if args.val_fraction is not None and not 0 <= args.val_fraction < 1:
        parser.error(f"--val_fraction must be at least 0 and below 1, not {args.val_fraction}")
    if args.segmentations is not None and args.segmentations < 1:
        parser.error(f"--segmentations must be at least 1, not {args.segmentations}")
    if args.workers < 1:
        parser.error(f"--workers must be at least 1, not {args.workers}")
    if args.conversations is not None:
        check_conversations(parser, args)
    elif args.data_split is not None:
        parser.error("--data_split is for --conversations")
    args.data = args.data or BUILTIN
    args.out = args.out or default_out(args.data)
    return args


def check_conversations(parser: OneLineParser, args: argparse.Namespace) -> None:
    """Flags that go with --conversations; they become `data`. Raises UsageError: others do not."""
    for name in ("data", "vocab_size", "text_column", "segmentations"):
        if getattr(args, name) is not None:
            parser.error(f"--{name} is for text, and does not go with --conversations")
    if args.tokenizer is None:
        parser.error("--conversations takes the tokenizer of the model to train: pass --tokenizer")
    try:
        args.stage_share = first_share(args.data_split or "1")
    except ValueError:
        parser.error(f"--data_split must be shares, as in 2,4,4, not {args.data_split}")
    args.data = args.conversations
    if args.out is None:
        args.out = default_out(args.data)
        args.out = args.out.with_name(f"{args.out.name}-chat")


def report(description: dict, out: Path, seconds: float, workers: int) -> str:
    splits = description["splits"]
    ways = description["prepared_from"]["segmentations"]
    of_text = description["kind"] == TEXT
    kind, documents = ("text", "documents") if of_text else ("answers", CONVERSATIONS)
    tokens = sum(split.get("answers", split)["tokens"] for split in splits.values())
    bytes_per_token = sum(split["bytes"] for split in splits.values()) / tokens
    n_bytes = splits["val"]["bytes"] + splits["train"]["bytes"] // ways
    lines = [
        f"{out}: {size(n_bytes)} of {kind} in {seconds:.1f} s "
        f"({size(n_bytes / seconds)}/s with {workers} processes)"
    ]
    for name, split in splits.items():
        times = ways if name == "train" else 1
        n, word = counted(split["documents"] // times, documents).split()
        line = f"  {name:5} {n:>9} {word:{len(documents)}} {split['tokens']:>13,} tokens"
        line += f", {split['answers']['tokens']:,} of them in answers" if "answers" in split else ""
        lines.append(line + (f", each document cut in {times} ways" if times > 1 else ""))
    lines.append(
        f"  vocabulary {description['vocab_size']:,}, {bytes_per_token:.2f} bytes per token"
    )
    if description["for_other_stages"]:
        others = counted(description["for_other_stages"], documents)
        lines.append(f"  {others} left to other stages of training (--data_split)")
    if description["bad_documents"]:
        lines.append(
            f"  skipped {counted(description['bad_documents'], f'bad {documents}')}, the first: "
            f"{description['first_bad_document']}"
        )
    if description["prepared_from"]["val_fraction"] and not splits["val"]["documents"]:
        small = f"; a .txt under {BY_SIZE[0].section_bytes // 1024} KiB is one document"
        lines.append(
            f"  WARNING: no validation {documents[:-1]}: that takes two different {documents} at "
            f"least{small if of_text else ''}"
        )
    return "\n".join(lines)


def chosen_by_size(files: list[str], options: PackingOptions) -> str:
    """What was taken because the text has this size, and the flags that say otherwise."""
    suited, taken = suited_to(text_size(files)), []
    if options.vocab_size is None and options.tokenizer is None:
        taken.append(f"a vocabulary of {suited.vocab_size:,} at most (--vocab_size)")
    if options.val_fraction is None:
        taken.append(f"{options.share(files):.0%} for validation (--val_fraction)")
    if options.segmentations is None and suited.segmentations > 1:
        taken.append(f"{suited.segmentations} ways to cut a document into pieces (--segmentations)")
    if options.kind == TEXT and any(path.endswith((".txt", ".py")) for path in files):
        taken.append(f"long files cut into documents of {suited.section_bytes // 1024} KiB")
    return f"  by the size of the text: {', '.join(taken) or 'nothing'}"


def describe_folder(folder: Path, files: list[str], suffixes: tuple[str, ...]) -> str:
    """How many files below it were read, and how many were not."""
    left_out = sum(path.is_file() for path in folder.rglob("*")) - len(files)
    read = f"{counted(len(files), 'files')} read ({', '.join(suffixes)})"
    return f"{folder}: {read}, {left_out:,} left out"


def prepare_anew(args: argparse.Namespace, files: list[str], options: PackingOptions) -> None:
    """And say what came of it."""
    start = time.perf_counter()
    of_text = options.kind == TEXT
    total = bytes_to_read(files) if of_text or args.data != BUILTIN else None
    with progress_bar(total, desc="encoding", unit="B", scale=True) as bar:
        description = prepare(files, args.out, options, bar.update)
    if args.data != BUILTIN and os.path.isdir(args.data):
        suffixes = SUFFIXES if of_text else CONVERSATION_SUFFIXES
        print(describe_folder(Path(args.data), files, suffixes))
    print(report(description, args.out, time.perf_counter() - start, args.workers))
    print(chosen_by_size(files, options))


def sources(args: argparse.Namespace) -> tuple[list[str], PackingOptions]:
    """The files, and how they are prepared."""
    options = {
        "vocab_size": args.vocab_size,
        "val_fraction": args.val_fraction,
        "workers": args.workers,
        "skip_bad_lines": args.skip_bad_lines,
        "tokenizer": args.tokenizer,
    }
    if args.conversations is not None:
        files = find_files(args.data, CONVERSATION_SUFFIXES)
        return files, ConversationOptions(**options, stage_share=args.stage_share)
    files = find_files(args.data)
    require_columns(files, args.text_column)
    column = args.text_column or TEXT_COLUMN
    return files, PackingOptions(**options, text_column=column, segmentations=args.segmentations)


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("prepare_data", UsageError, OSError):
        args = parse_arguments(argv)
        files, options = sources(args)
        asked = {"reuse": args.reuse, "overwrite": args.overwrite}
        said = find_prepared(args.out, files, options, **asked)
        if said is None:
            with one_at_a_time(args.out):  # for which another may have prepared it
                said = find_prepared(args.out, files, options, **asked)
                if said is None:
                    prepare_anew(args, files, options)
                    return
        print(f"{args.out}: {said}")


if __name__ == "__main__":
    stop_in_order()
    main()
