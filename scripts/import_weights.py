"""Turn a Llama of others into this project's weights.

python -m scripts.import_weights SOURCE out/imported/NAME

SOURCE is a Hugging Face folder, Meta's folder, or a state dict in a .pth or .safetensors file.
"""

import argparse
import json
import shutil
from pathlib import Path

from common.errors import UsageError, one_line_errors
from common.numbers import counted
from common.parser import OneLineParser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m scripts.import_weights", description=__doc__)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder or file to read")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--tokenizer", type=Path, help="SentencePiece model (default: tokenizer.model beside them)"
    )
    unsaid = "where the files do not say it"
    parser.add_argument("--n_heads", type=int, help=f"query heads, {unsaid}")
    parser.add_argument(
        "--norm_eps", type=float, help=f"added in RMSNorm, {unsaid} (default: 1e-5)"
    )
    parser.add_argument(
        "--rope_theta", type=float, help=f"of the positions, {unsaid} (default: 10000)"
    )
    parser.add_argument(
        "--max_seq_len", type=int, help="context length (default: as the files say, or 2048)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an older import")
    return parser.parse_args(argv)


def is_import(folder: Path) -> bool:
    """Whether this folder holds portable weights, and nothing besides."""
    from data.tokenizer import TOKENIZER_FILE
    from formats.portable import CONFIG_FILE, WEIGHTS_FILE

    try:
        values = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    names = {path.name for path in folder.iterdir()}
    ours = isinstance(values, dict) and "n_layers" in values
    return ours and names <= {CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE}


def choose_settings(args: argparse.Namespace, given: dict) -> tuple[dict, list[str]]:
    """Every setting that shapes do not tell, and a word for each on where it comes from.

    Raises:
        UsageError: the number of heads is unknown, or a flag contradicts the files.
    """
    from formats.state_dicts import DEFAULTS, SETTINGS

    settings, said = {}, []
    for name in SETTINGS:
        flag = getattr(args, name)
        # Positions need no weights, so the context may be another than in training.
        if flag is not None and name != "max_seq_len" and given.get(name, flag) != flag:
            raise UsageError(f"--{name} {flag}, but {args.source} says {given[name]}")
        if flag is not None:
            settings[name], origin = flag, "as asked"
        elif name in given:
            settings[name], origin = given[name], "from the files"
        elif name in DEFAULTS:
            settings[name], origin = DEFAULTS[name], f"assumed, --{name} for another"
        else:
            raise UsageError(f"{args.source} does not say how many heads it has: pass --{name}")
        said.append(f"{name} {settings[name]:g} ({origin})")
    return settings, said


def copy_tokenizer(args: argparse.Namespace, vocab_size: int, folder: Path) -> str:
    """Put the tokenizer beside the weights if there is one; says what was done.

    Raises:
        DataError: the file of --tokenizer is none, or has more pieces than the model.
    """
    from data.errors import DataError
    from data.tokenizer import TOKENIZER_FILE, Tokenizer

    beside = args.source if args.source.is_dir() else args.source.parent
    path = args.tokenizer or beside / TOKENIZER_FILE
    need = "text needs one: pass --tokenizer FILE"
    if args.tokenizer is None and not path.exists():
        return f"none: there is no {path} (SentencePiece); {need}"
    try:
        tokenizer = Tokenizer(path)
    except DataError as error:
        if args.tokenizer:
            raise
        return f"none: {error}; {need}"
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"{path} has {tokenizer.vocab_size} pieces, the model only {vocab_size}: they do not "
            "belong together"
        )
    shutil.copyfile(path, folder / TOKENIZER_FILE)
    return f"{path}, {tokenizer.vocab_size:,} pieces"


def import_weights(args: argparse.Namespace) -> None:
    from common.atomic import new_folder
    from formats.portable import save_portable
    from formats.state_dicts import read_foreign, to_ours

    if not args.source.exists():
        raise UsageError(f"{args.source}: no such file or folder")
    if is_import(args.source):
        raise UsageError(f"{args.source} is in this project's form already")
    with new_folder(args.out, "import", is_import, args.overwrite) as folder:
        foreign = read_foreign(args.source)
        settings, said = choose_settings(args, foreign.settings)
        config, weights = to_ours(foreign, settings, str(args.source))
        save_portable(folder, config, weights)
        tokenizer = copy_tokenizer(args, config.vocab_size, folder)
    millions = sum(weight.numel() for weight in weights.values()) / 1e6
    layers, kv_heads = counted(config.n_layers, "layers"), counted(config.n_kv_heads, "kv heads")
    shape = f"dim {config.dim}, {layers}, {kv_heads}, vocabulary"
    tied = "tied" if config.tie_embeddings else "not tied"
    print(f"{args.out}: {millions:.2f} million parameters from {args.source}")
    print(f"  shape:     {shape} {config.vocab_size:,}, embeddings {tied}")
    print(f"  settings:  {', '.join(said)}")
    print(f"  tokenizer: {tokenizer}")


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("import_weights", UsageError):
        args = parse_arguments(argv)
    from data.errors import DataError
    from model.config import ConfigError

    with one_line_errors("import_weights", UsageError, ConfigError, DataError, OSError):
        import_weights(args)


if __name__ == "__main__":
    main()
