"""Export a model and its tokenizer to one GGUF file for llama.cpp.

python -m scripts.export_gguf out/runs/NAME model.gguf --type q8_0

llama.cpp computes the same token ids as data.tokenizer, except that it reads U+2581 as a space.
"""

from pathlib import Path

from lm.common.errors import UsageError, one_line_errors
from lm.common.parser import OneLineParser


@one_line_errors("export_gguf", UsageError, OSError)
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m scripts.export_gguf", description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="run folder, RUN@best, checkpoint, folder of weights, or 'auto'")
    add("out", type=Path, metavar="OUT", help="file to write, such as model.gguf")
    types = "type of the matrices; bytes per weight: f32 4 (exact), f16 2, q8_0 about 1"
    add("--type", choices=("f32", "f16", "q8_0"), default="f32", help=types)
    add("--overwrite", action="store_true", help="replace OUT if it exists")
    args = parser.parse_args(argv)
    if args.out.exists() and not args.overwrite:
        parser.error(f"{args.out} exists: pass --overwrite to replace it")

    from lm.formats.gguf import export_gguf  # importing torch takes seconds
    from lm.storage.weights import load_trained

    trained = load_trained(args.run)
    summary = export_gguf(trained.model, trained.tokenizer, args.out, args.type, trained.chats)
    print(f"{args.out}: {trained.folder} as {summary}")


if __name__ == "__main__":
    main()
