"""Merge a LoRA adapter in PEFT's format into its base model, and write the merged weights.

python -m scripts.merge_lora out/runs/NAME/base out/runs/NAME/adapter out/merged/NAME
"""

import shutil
from collections import ChainMap
from pathlib import Path

from common.atomic import new_folder
from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser


@one_line_errors("merge_lora", UsageError, OSError)
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m scripts.merge_lora", description=__doc__)
    add = parser.add_argument
    add("base", metavar="BASE", help="run folder, RUN@best, checkpoint or folder of weights")
    add("adapter", type=Path, metavar="ADAPTER", help="adapter folder of a run or of PEFT")
    add("out", type=Path, metavar="OUT", help="folder to write")
    add("--overwrite", action="store_true", help="replace older weights in OUT")
    args = parser.parse_args(argv)

    from data.chat_template import TEMPLATE_FILE
    from data.tokenizer import copy_tokenizer
    from formats.import_weights import is_import  # importing torch takes seconds
    from formats.peft import load_adapter
    from formats.portable import save_portable
    from model.lora import Merged
    from storage.weights import load_trained

    with new_folder(args.out, "folder of weights", is_import, args.overwrite) as folder:
        trained = load_trained(args.base)
        config = trained.model.config
        base = {name: parameter.detach() for name, parameter in trained.model.named_parameters()}
        adapter, scaling = load_adapter(args.adapter, config)
        save_portable(folder, config, dict(Merged(ChainMap(adapter, base), scaling)))
        copy_tokenizer(trained.tokenizer.path, folder)
        for source in (Path(trained.tokenizer.path).parent, args.adapter):
            if (source / TEMPLATE_FILE).exists():
                shutil.copyfile(source / TEMPLATE_FILE, folder / TEMPLATE_FILE)
    print(f"{args.out}: {args.adapter} added to {trained.folder}")


if __name__ == "__main__":
    main()
