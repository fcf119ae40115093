"""Export a model to a Hugging Face folder, which transformers loads as a Llama or Qwen3.

python -m scripts.export_hf out/runs/NAME out/hf/NAME
"""

import argparse
from functools import partial
from pathlib import Path

from lm.common.atomic import new_folder
from lm.common.errors import UsageError, one_line_errors
from lm.common.parser import OneLineParser


@one_line_errors("export_hf", UsageError, OSError)
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m scripts.export_hf", description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="run folder, RUN@best, checkpoint, folder of weights, or 'auto'")
    add("out", type=Path, metavar="OUT", help="folder to write")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="precision")
    on_or_off = argparse.BooleanOptionalAction
    add("--tokenizer", action=on_or_off, default=True, help="also export the tokenizer")
    add("--overwrite", action="store_true", help="replace an older export in OUT")
    args = parser.parse_args(argv)

    from lm.formats.hugging_face import MARK, write_model, write_tokenizer  # slow import
    from lm.formats.portable import has_setting
    from lm.storage.weights import load_trained

    with new_folder(args.out, "export", partial(has_setting, MARK), args.overwrite) as folder:
        trained = load_trained(args.run)
        model, tokenizer = trained.model, trained.tokenizer
        write_model(folder, model, tokenizer, args.dtype)
        if args.tokenizer:
            write_tokenizer(folder, tokenizer, model.config.max_seq_len, chat=trained.chats)
    content = "model and tokenizer" if args.tokenizer else "model without tokenizer"
    print(f"{args.out}: {content} of {trained.folder} in {args.dtype}")


if __name__ == "__main__":
    main()
