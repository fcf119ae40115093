"""Prepare text or conversations: write token shards, and train a tokenizer for text.

python -m scripts.prepare_data --data my.jsonl
python -m scripts.prepare_data --conversations chat.jsonl --tokenizer out/runs/NAME/tokenizer.model

lm/data/conversations.py describes the formats of conversations.
"""

import argparse
import os
import time
from functools import partial
from pathlib import Path

from lm.common.atomic import one_at_a_time
from lm.common.errors import UsageError, one_line_errors, stop_in_order
from lm.common.numbers import available_cores, counted, progress_bar, size
from lm.common.parser import OneLineParser
from lm.data.conversations import CHAT_SUFFIXES
from lm.data.corpus import BUILTIN, SUFFIXES, TEXT_COLUMN, all_files, suffix_of
from lm.data.prepare import Preparation, default_out
from lm.data.shards import CONVERSATIONS, TEXT
from lm.formats.tokenizer_json import export_warning

BY_SIZE = "default: by the size of the text"
UNSTRUCTURED = (".txt", ".py")  # files without columns
FAR_OFF = 0.75  # fewer bytes per token than this share of the usual number: a warning


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m scripts.prepare_data", description=__doc__)
    add = parser.add_argument
    source = f"file, a folder of files, or '{BUILTIN}'"
    add("--data", help=f"{', '.join(SUFFIXES)} {source} (default: {BUILTIN})")
    source = f"{', '.join(CHAT_SUFFIXES)} {source}"
    add("--conversations", metavar="DATA", help=f"conversations instead of text: {source}")
    add("--out", type=Path, help="folder to write (default: out/data/NAME[-chat])")
    add("--vocab_size", type=int, help=f"pieces of the tokenizer ({BY_SIZE})")
    add("--tokenizer", help="tokenizer file, or its folder (default: train a new one)")
    add("--val_fraction", type=float, help=f"share of documents for validation ({BY_SIZE})")
    add("--text_column", help=f"key or column of the text (default: {TEXT_COLUMN})")
    add("--segmentations", type=int, help=f"ways to tokenize a training document ({BY_SIZE})")
    add("--workers", type=int, default=available_cores(), help="number of encoding processes")
    add("--skip_bad_lines", action="store_true", help="skip and count unreadable documents")
    text = "cut texts at names of markers, such as <s> or <|im_end|>, and remove the names"
    add("--markers", action="store_true", default=None, help=text)
    add("--overwrite", action="store_true", help="replace data of another text or other settings")
    add("--reuse", action="store_true", help="accept other settings; replace data of changed text")
    args = parser.parse_args(argv)
    if not 0 <= (args.val_fraction or 0) < 1:
        parser.error(f"--val_fraction must be at least 0 and below 1, not {args.val_fraction}")
    segmentations = 1 if args.segmentations is None else args.segmentations
    if (least := min(args.workers, segmentations)) < 1:
        parser.error(f"--segmentations and --workers must be at least 1, not {least}")
    if args.conversations is not None:
        for name in ("data", "vocab_size", "text_column", "segmentations", "markers"):
            if getattr(args, name) is not None:
                parser.error(f"--{name} cannot be used with --conversations")
        if args.tokenizer is None:
            parser.error("--conversations needs the tokenizer of the model: pass --tokenizer")
    args.data = args.conversations or args.data or BUILTIN
    args.kind = TEXT if args.conversations is None else CONVERSATIONS
    args.out = args.out or default_out(args.data, is_chat=args.kind == CONVERSATIONS)
    return args


def report(description: dict, made: Preparation, seconds: float) -> str:
    """Return size, speed, files of a folder, both splits, vocabulary, warnings and settings."""
    splits, of_text = description["splits"], made.kind == TEXT
    ways = {"train": made.segmentations, "val": 1}
    measured, documents = ("text", "documents") if of_text else ("answers", CONVERSATIONS)
    n_bytes = sum(split["bytes"] // ways[name] for name, split in splits.items())
    speed = f"{size(n_bytes / seconds)}/s with --workers {made.workers}"
    lines = [f"{size(n_bytes)} of {measured} in {seconds:.1f} s ({speed})"]
    if Path(made.source).is_dir():
        lines += about_folder(made)
    for name, split in splits.items():
        n, word = counted(split["documents"] // ways[name], documents).split()
        line = f"  {name:5} {n:>9} {word:{len(documents)}} {split['tokens']:>13,} tokens"
        if "answers" in split:
            line += f", {split['answers']['tokens']:,} of them in answers"
        lines.append(line)
    tokens = sum(split.get("answers", split)["tokens"] for split in splits.values())
    per_token = sum(split["bytes"] for split in splits.values()) / tokens
    line = f"  vocabulary {description['vocab_size']:,}, {per_token:.2f} bytes per token"
    low, high = made.defaults.bytes_per_token
    if of_text and made.vocab_size is None and per_token < FAR_OFF * low:
        line += f" (WARNING: usual are {low:g} to {high:g})"
    lines.append(line)
    if n_bad := description["bad_documents"]:
        bad = counted(n_bad, f"bad {documents}")
        lines.append(f"  skipped {bad}, the first: {description['first_bad_document']}")
    if (marked := description["documents_with_markers"]) and made.source != BUILTIN:
        held = ", ".join(f"{name!r} in {counted(n, documents)}" for name, n in marked.items())
        remedy = "--markers cuts there, PREPARE_FLAGS=--markers in front of run_accelerate.sh"
        remedy = remedy if of_text else "remove the markers, each turn gets its own"
        warning = f"WARNING: markers as text: {held}: {remedy}"
        lines.append("  " + (f"cut at markers: {held}" if made.markers else warning))
    if unread := description["unread_keys"]:
        keys = ", ".join(f'"{key}" in {counted(n, documents)}' for key, n in unread.items())
        lines.append(f"  keys that are not read: {keys}")
    if (made.val_fraction or made.splits["val"]) and not splits["val"]["documents"]:
        lines.append("  WARNING: no validation split: pass a larger --val_fraction, or more text")
    chosen = f"  settings: --val_fraction {made.val_fraction:g}, --segmentations {ways['train']}"
    if of_text and any(suffix_of(path) in UNSTRUCTURED for path in made.files):
        longest = made.defaults.section_bytes // 1024
        chosen += f", long files cut into documents of {longest} KiB"
    return "\n".join([*lines, chosen])


def about_folder(made: Preparation) -> list[str]:
    """Return lines that count and name the files of a folder: read, ignored, of each split."""
    read = {os.path.realpath(path) for path in made.files}  # a file may have several names
    others = {*all_files(made.source, hidden=True)} - {*made.splits["test"]}
    ignored = sorted(path for path in others if os.path.realpath(path) not in read)
    first = f", the first: {ignored[0]}" if ignored else ""
    lines = [f"  read {counted(len(made.files), 'files')}, ignored {len(ignored):,}{first}"]
    for name, role in (("val", "for validation"), ("test", "not read, for testing")):
        if paths := made.splits[name]:
            lines.append(f"  {role}: {counted(len(paths), 'files')}, the first: {paths[0]}")
    return lines


@one_line_errors("prepare_data", UsageError, OSError)
def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    made = Preparation(
        source=args.data,
        kind=args.kind,
        workers=args.workers,
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
        val_fraction=args.val_fraction,
        segmentations=args.segmentations,
        text_column=args.text_column or TEXT_COLUMN,
        skip_bad_lines=args.skip_bad_lines,
        markers=bool(args.markers),
    )
    if args.text_column and all(suffix_of(path) in UNSTRUCTURED for path in made.files):
        raise UsageError(f"{args.data} has no columns: leave out --text_column")
    find = partial(made.found_in, args.out, args.reuse, args.overwrite)
    if not (found := find()):  # only writing needs a lock: the folder may be read-only
        with one_at_a_time(args.out):
            if not (found := find()):  # another process may have prepared the data meanwhile
                start = time.perf_counter()
                # The built-in conversations use only a part of their source.
                total = None if args.conversations == BUILTIN else made.text_size
                with progress_bar(total, desc="encoding", unit="B", scale=True) as bar:
                    description = made.write(args.out, bar.update)
                found = report(description, made, time.perf_counter() - start)
    # Before anybody trains on the data, say what its tokenizer excludes.
    warning = export_warning(args.out)
    print(f"{args.out}: {found}" + (f"\n  {warning}" if warning else ""))


if __name__ == "__main__":
    stop_in_order()
    main()
