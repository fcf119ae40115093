"""Import a Llama of others: its weights in this project's form, with its tokenizer."""

from pathlib import Path

from common.atomic import new_folder
from common.errors import UsageError
from common.numbers import counted
from data.chat_template import JINJA, PLAIN_JINJA, TEMPLATE_FILE
from data.errors import DataError
from data.tokenizer import (
    MARKERS_FILE,
    TOKENIZER_FILES,
    copy_tokenizer,
    open_tokenizer,
    tokenizer_in,
)
from formats.portable import CONFIG_FILE, WEIGHTS_FILE, read_json, save_portable
from formats.state_dicts import DEFAULTS, SETTINGS, read_foreign, to_ours
from model.config import ConfigError


def import_weights(
    source: Path, out: Path, *, tokenizer: Path | None = None, overwrite: bool = False, **settings
) -> str:
    """Read somebody's weights and write this project's; return a summary for the user.

    Args:
        tokenizer: a file or a folder with one; None takes what is beside the weights, if anything.
        settings: values for SETTINGS that the files leave open; None means not given.

    Raises UsageError: no such source, a place that must not be replaced, or see `choose_settings`.
    ConfigError, DataError: weights or a tokenizer that cannot be read, or cannot serve here.
    OSError: the disk is full or refuses.
    """
    if not source.exists():
        raise UsageError(f"{source}: no such file or folder")
    if is_import(source):
        raise UsageError(f"{source} is in this project's form already")
    with new_folder(out, "import", is_import, overwrite) as folder:
        foreign = read_foreign(source)
        settings, said = choose_settings(source, settings, foreign.settings)
        config, weights = to_ours(foreign, settings, str(source))
        save_portable(folder, config, weights)
        copied = take_tokenizer(source, tokenizer, config.vocab_size, folder)
        if answers(source):
            (folder / TEMPLATE_FILE).write_text(f"{PLAIN_JINJA}\n", encoding="utf-8")
    millions = sum(weight.numel() for weight in weights.values()) / 1e6
    layers, kv_heads = counted(config.n_layers, "layers"), counted(config.n_kv_heads, "kv heads")
    shape = f"dim {config.dim}, {layers}, {kv_heads}, vocabulary {config.vocab_size:,}"
    return (
        f"{out}: {millions:.2f} million parameters from {source}\n"
        f"  shape:     {shape}, embeddings {'tied' if config.tie_embeddings else 'not tied'}\n"
        f"  settings:  {', '.join(said)}\n"
        f"  tokenizer: {copied}"
    )


def is_import(folder: Path) -> bool:
    """Return True for a folder of portable weights with nothing besides."""
    try:
        ours = "n_layers" in read_json(folder / CONFIG_FILE)
    except ConfigError:
        return False
    names = {path.name for path in folder.iterdir()}
    return ours and names <= {CONFIG_FILE, WEIGHTS_FILE, TEMPLATE_FILE, *TOKENIZER_FILES}


def answers(source: Path) -> bool:
    """Return True for an export of this project whose model has learned to answer."""
    try:
        return read_json(source / MARKERS_FILE).get("chat_template") == JINJA
    except ConfigError:
        return False


def choose_settings(source: Path, asked: dict, given: dict) -> tuple[dict, list[str]]:
    """Return all of SETTINGS, and for each a word on where it comes from. Raises UsageError: the
    number of heads is unknown, or what is asked contradicts the files."""
    settings, said = {}, []
    for name in SETTINGS:
        flag = asked.get(name)
        # Positions need no weights, so the context may be another than in training.
        if flag is not None and name != "max_seq_len" and given.get(name, flag) != flag:
            raise UsageError(f"--{name} {flag}, but {source} says {given[name]}")
        if flag is not None:
            settings[name], origin = flag, "as asked"
        elif name in given:
            settings[name], origin = given[name], "from the files"
        elif name in DEFAULTS:
            settings[name], origin = DEFAULTS[name], f"assumed, --{name} for another"
        else:
            raise UsageError(f"{source} does not say how many heads it has: pass --{name}")
        said.append(f"{name} {settings[name]:g} ({origin})")
    return settings, said


def take_tokenizer(source: Path, asked: Path | None, vocab_size: int, folder: Path) -> str:
    """Copy the tokenizer into `folder` if there is one; return a word on it. Raises DataError: the
    file that was asked for is none, or it has more pieces than the model."""
    path = asked or tokenizer_in(source if source.is_dir() else source.parent)
    need = "text needs one: pass --tokenizer FILE"
    if asked is None and not path.exists():
        return f"none: there is no {path} and no tokenizer.json; {need}"
    try:
        tokenizer = open_tokenizer(path)
    except DataError as error:
        if asked:
            raise
        return f"none: {error}; {need}"
    if tokenizer.vocab_size > vocab_size:
        raise DataError(f"{path} has {tokenizer.vocab_size} pieces, the model only {vocab_size}")
    copy_tokenizer(path, folder)
    return f"{tokenizer.path}, {tokenizer.vocab_size:,} pieces"
