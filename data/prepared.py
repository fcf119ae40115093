"""What a folder of prepared data was made from: whether it serves again, or may be replaced."""

from pathlib import Path

from common.errors import UsageError
from data.errors import DataError
from data.packing import PackingOptions, describe_sources
from data.shards import DESCRIPTION_FILE, read_description
from data.tokenizer import tokenizer_hash


def find_prepared(
    out: Path, files: list[str], options: PackingOptions, *, reuse: bool, overwrite: bool
) -> str | None:
    """How far `out` holds these files prepared already, in words; None where it is to be written.

    Args:
        files: from `corpus.find_files`.
        reuse: whether the same text with other settings serves too.
        overwrite: whether data from other text may be replaced.

    Raises UsageError: `out` is something that must not be written over. DataError, OSError: the
    text or tokenizer cannot be read.
    """
    source = describe_sources(files, options)
    stored = prepared_from(out, source["vocab_size"])
    if stored == source:
        return "already prepared from this text"
    if reuse and stored.get("files_sha256") == source["files_sha256"]:
        return "prepared from this text with other settings, used as it is"
    refuse_to_replace(out, files)
    if reuse and stored.get("source", source["source"]) != source["source"]:
        raise UsageError(
            f"{out} was prepared from {stored['source']}, another text of that name: rename one of "
            "them"
        )
    if out.exists() and not (overwrite or reuse):
        what = "was prepared from other text or with other settings" if stored else "exists"
        raise UsageError(f"{out} {what}: pass --overwrite to replace it, or another --out")
    return None


def prepared_from(out: Path, vocab_size: int | None) -> dict:
    """From what and how the data in `out` was made; empty if there is none, or not whole. If a
    tokenizer of `vocab_size` pieces was trained, it is as if so many had been asked for."""
    try:
        description = read_description(out)
        if description["tokenizer_sha256"] != tokenizer_hash(out):
            return {}
        source = description["prepared_from"]
        if source["tokenizer"] is None and description["vocab_size"] == vocab_size:
            source["vocab_size"] = vocab_size
        # Before there was a choice, it was that.
        return {"text_column": "text", "segmentations": 1} | source
    except (DataError, OSError, KeyError):
        return {}


def refuse_to_replace(out: Path, files: list[str]) -> None:
    """Raises UsageError: `out` is something that must not be written over."""
    if any(out.resolve() in Path(path).resolve().parents for path in files):
        raise UsageError(f"--out {out} holds the text itself: choose another folder")
    if out.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise UsageError(f"--out {out} is the working folder or above it: choose another")
    if out.is_dir() and any(out.iterdir()) and not (out / DESCRIPTION_FILE).exists():
        raise UsageError(f"--out {out} exists and is no prepared data: choose another folder")
