"""What a folder of prepared data was made from: whether it serves again, or may be replaced."""

import hashlib
from pathlib import Path

from common.errors import UsageError
from data.corpus import BUILTIN, SUFFIXES
from data.errors import DataError
from data.packing import PackingOptions, describe_sources
from data.shards import DESCRIPTION_FILE, read_description
from data.tokenizer import tokenizer_hash


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


def conversations_out(conversations: str, tokenizer: Path, flags: str = "") -> Path:
    """The same for conversations: each file, of which many are called train.jsonl, and tokenizer
    has a folder of its own. Raises DataError: there is no such tokenizer."""
    if not tokenizer.is_file():
        raise DataError(f"{tokenizer} is not there: conversations take the tokenizer of the model")
    words = [tokenizer_hash(tokenizer), flags]
    if conversations != BUILTIN:
        words.append(str(Path(conversations).resolve()))
    out = default_out(conversations, " ".join(words))
    return out.with_name(f"{out.name}-chat")


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
