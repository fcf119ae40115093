"""Folders of prepared data: their names, and whether they are reused or replaced."""

import hashlib
from contextlib import suppress
from pathlib import Path

from common.errors import UsageError
from data.corpus import BUILTIN, SUFFIXES
from data.packing import PackingOptions, describe_sources
from data.shards import CONVERSATIONS, DESCRIPTION_FILE, TEXT, read_description
from data.tokenizer import tokenizer_hash


def default_out(data: str, flags: str = "", kind: str = TEXT) -> Path:
    """Return the folder for prepared data: out/data/ and the data's name without its suffix.
    A hash of `flags` follows if there are flags. Conversations have "-chat" at the end."""
    name = Path(data).resolve().name if data != BUILTIN else BUILTIN
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        name = name[: -len(suffix)] if name.lower().endswith(suffix) else name
    if words := flags.split():
        name += "-" + hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]
    return Path("out/data") / (name if kind == TEXT else f"{name}-chat")


def conversations_out(conversations: str, tokenizer: Path) -> Path:
    """Return the folder for encoded conversations. Raises UsageError without the tokenizer file."""
    if not tokenizer.is_file():
        raise UsageError(f"{tokenizer}, the tokenizer of the model, is missing")
    words = [tokenizer_hash(tokenizer)]
    if conversations != BUILTIN:
        words.append(str(Path(conversations).resolve()))
    return default_out(conversations, " ".join(words), CONVERSATIONS)


def find_prepared(
    out: Path, files: list[str], options: PackingOptions, reuse: bool, overwrite: bool
) -> str | None:
    """Return a message that says why `out` can be used, or None if `out` must be written.
    With `reuse`, settings may differ, and data that is damaged or whose source files changed is
    replaced. With `overwrite`, all other data is replaced. Raises UsageError if `out` must stay."""
    source, stored = describe_sources(files, options), {}
    with suppress(UsageError, OSError, KeyError):  # `out` is missing or damaged
        description = read_description(out)
        if description["tokenizer_sha256"] == tokenizer_hash(out):
            stored = description["prepared_from"]
    if stored == source:
        return "already prepared from this text"
    if reuse and stored.get("files_sha256") == source["files_sha256"]:
        return "prepared from this text with other settings, used as it is"
    if any(out.resolve() in Path(path).resolve().parents for path in files):
        raise UsageError(f"--out {out} holds the text itself: choose another folder")
    if out.is_dir() and any(out.iterdir()) and not (out / DESCRIPTION_FILE).exists():
        raise UsageError(f"--out {out} exists and is not prepared data: choose another folder")
    same_name = reuse and stored.get("source", source["source"]) == source["source"]
    if out.exists() and not (overwrite or same_name):
        holds = f"holds other data, of {stored['source']}" if stored else "exists"
        raise UsageError(f"{out} {holds}: pass another --out or --overwrite")
    return None
