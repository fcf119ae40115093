"""Write a model and its tokenizer into one GGUF file, for llama.cpp and what is built on it.

python -m scripts.export_gguf out/runs/NAME model.gguf --type q8_0

llama.cpp gives the token ids of data.tokenizer, but takes U+2581 in a text for a space.
"""

from pathlib import Path

from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser


@one_line_errors("export_gguf", UsageError, OSError)
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m scripts.export_gguf", description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="run folder, RUN@best, checkpoint, folder of weights, or 'auto'")
    add("out", type=Path, metavar="OUT", help="file to write, as in model.gguf")
    what = "of the matrices: 4, 2 or about 1 byte per number; f32 is exact"
    add("--type", choices=("f32", "f16", "q8_0"), default="f32", help=what)
    add("--overwrite", action="store_true", help="replace OUT")
    args = parser.parse_args(argv)
    if args.out.exists() and not args.overwrite:
        parser.error(f"{args.out} exists: pass --overwrite to replace it")

    from formats.gguf import export_gguf  # these import torch, which takes seconds
    from storage.weights import load_trained

    trained = load_trained(args.run)
    said = export_gguf(trained.model, trained.tokenizer, args.out, args.type, trained.chats)
    print(f"{args.out}: {trained.folder} as {said}")


if __name__ == "__main__":
    main()
