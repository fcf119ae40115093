"""Write a folder that transformers loads as a Llama, with no code of ours.

python -m scripts.export_hf out/runs/NAME out/hf/NAME
"""

import argparse
import json
import random
import shutil
from pathlib import Path

from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser

MARK = "exported_by"  # in config.json: what may be replaced with --overwrite
DTYPES = ("float32", "bfloat16", "float16")
TOLERANCE = 1e-5  # of logits in fp32, or this share of the largest one where that is above 1
CHECKED_TOKENS = 256  # sequence length of the logits compared
RANDOM_TEXTS = 2000

# What readers of tokenizers stumble over; the check adds random strings of pieces.
NASTY_TEXTS = (
    *(
        "",
        " ",
        "   a  b     c      ",
        "\tif x:\n\t\treturn\t",
        "\n\na\n\n\nb\n",
        "a\r\nb\r\n\r\r\n",
    ),
    *(
        "第1句:你好,世界。「龘」",
        "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
        "e\u0301 n\u0303 é Å A\u030a ﬁ ① ½",
        "שלום مرحبا 한국어",
    ),
    *("<s>", "a</s>b<unk>", "<0x41><0x0A>", "\u2581\u2581a\u2581 \u2581 b \u2581", "\0a\0\0b\0"),
    *("\ufeffa\ufffd\uffff\U0010ffff", "".join(map(chr, range(256))), "a" * 1000, " " * 1000),
)

CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A Llama of {millions:.2f} million parameters: {n_layers} layers of width {dim}, {n_heads} heads,
{n_kv_heads} key/value heads, vocabulary {vocab_size:,}, context {max_seq_len:,} tokens, weights
in {dtype}. It was pretrained only: it continues text, and follows no instructions.

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("{name}")
    tokenizer = AutoTokenizer.from_pretrained("{name}")
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=50)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))

The tokenizer begins every text with its begin marker, as the documents did in training, unless
`add_special_tokens=False`. A marker's name in a text, such as `<s>`, is text and no marker; who
reads `tokenizer.json` with the `tokenizers` package sets `encode_special_tokens = True` for that.
`tokenizer.model` is the SentencePiece model that the other files were made from; what
`LlamaTokenizer` would make of it is not exact.
"""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m scripts.export_hf", description=__doc__)
    parser.add_argument(
        "run", metavar="RUN", help="run folder, checkpoint, folder of weights, or 'auto'"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights")
    parser.add_argument(
        "--tokenizer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="export the tokenizer too",
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="load what was written with transformers and compare",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an older export")
    return parser.parse_args(argv)


def write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def is_export(folder: Path) -> bool:
    try:
        return MARK in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def write_model(trained, dtype: str, name: str, folder: Path) -> None:
    """Weights, config, generation settings and a model card."""
    from formats.llama import DTYPES, llama_config, to_llama
    from formats.portable import CONFIG_FILE, WEIGHTS_FILE, save_tensors

    model, tokenizer = trained.model, trained.tokenizer
    config = model.config
    weights = {key: p.detach().to(DTYPES[dtype]) for key, p in model.named_parameters()}
    save_tensors(folder / WEIGHTS_FILE, to_llama(config, weights))
    values = llama_config(config, dtype, tokenizer.bos_id, tokenizer.eos_id)
    write_json(folder / CONFIG_FILE, values | {MARK: "scripts.export_hf"})
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    write_json(folder / "generation_config.json", generation)
    millions = model.num_parameters() / 1e6
    card = CARD.format(name=name, millions=millions, dtype=dtype, **config.to_dict())
    (folder / "README.md").write_text(card, encoding="utf-8")


def write_tokenizer(trained, folder: Path) -> None:
    """tokenizer.json, what transformers wants beside it, and the SentencePiece model itself.

    Raises:
        DataError: a tokenizer that has no exact equal.
    """
    from data.errors import DataError
    from data.tokenizer import TOKENIZER_FILE
    from formats.tokenizer_json import TOKENIZER_JSON, convert

    try:
        converted = convert(trained.tokenizer)
    except DataError as error:
        raise DataError(f"{error}; --no-tokenizer exports the weights alone") from error
    converted.save(str(folder / TOKENIZER_JSON))
    shutil.copyfile(trained.tokenizer.path, folder / TOKENIZER_FILE)
    markers = {
        "bos_token": converted.id_to_token(trained.tokenizer.bos_id),
        "eos_token": converted.id_to_token(trained.tokenizer.eos_id),
        "unk_token": converted.model.unk_token,
    }
    write_json(folder / "special_tokens_map.json", markers)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
        "model_max_length": trained.model.config.max_seq_len,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # "<s>" in a text is text
    }
    write_json(folder / "tokenizer_config.json", markers | settings)


def check_tokenizer(tokenizer, folder: Path) -> str:
    """What AutoTokenizer makes of the folder against ours, on many texts; says how many.

    Raises:
        UsageError: ids or decoded text differ.
    """
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    chooser = random.Random(0)
    ids = range(tokenizer.vocab_size)
    texts = list(NASTY_TEXTS)
    texts += [tokenizer.decode(chooser.choices(ids, k=20)) for _ in range(RANDOM_TEXTS)]
    for text, ours in zip(texts, tokenizer.encode_batch(texts), strict=True):
        theirs = loaded(text, add_special_tokens=False)["input_ids"]
        back = loaded.decode(ours, skip_special_tokens=True)
        if theirs != ours or back != tokenizer.decode(ours):
            raise UsageError(f"check failed: transformers' tokenizer differs on {text[:40]!r}")
        if loaded(text)["input_ids"] != [tokenizer.bos_id, *ours]:
            raise UsageError(f"check failed: no begin marker before {text[:40]!r}")
    return f"token ids and decoded text equal on {len(texts):,} texts"


def check_model(model, dtype: str, folder: Path) -> str:
    """Logits of AutoModelForCausalLM on the folder against ours, both computing in fp32 with the
    weights as they were stored; says how far apart. `model` is left with those weights.

    Raises:
        UsageError: further than TOLERANCE.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from formats.llama import DTYPES

    loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    if loaded.dtype != DTYPES[dtype]:
        raise UsageError(f"check failed: transformers reads the weights as {loaded.dtype}")
    length = min(model.config.max_seq_len, CHECKED_TOKENS)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (2, length), generator=generator)
    with torch.inference_mode():
        exact = model(tokens).logits
        for parameter in model.parameters():
            parameter.copy_(parameter.to(DTYPES[dtype]))
        ours, theirs = model(tokens).logits, loaded.float()(tokens).logits
    difference, largest = (ours - theirs).abs().max().item(), ours.abs().max().item()
    if not difference <= TOLERANCE * max(1, largest):
        raise UsageError(f"check failed: logits differ from transformers' by {difference:.1e}")
    said = f"logits of 2 × {length} tokens, up to {largest:.0f}, differ by {difference:.1e} at most"
    if dtype != "float32":
        said += f" in fp32; {dtype} itself moved them by up to {(ours - exact).abs().max():.1e}"
    return said


def check(trained, dtype: str, with_tokenizer: bool, folder: Path) -> list[str]:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    said = [check_model(trained.model, dtype, folder)]
    if with_tokenizer:
        said.append(check_tokenizer(trained.tokenizer, folder))
    return [f"  transformers {transformers.__version__}: {line}" for line in said]


def export(args: argparse.Namespace) -> None:
    from common.atomic import new_folder
    from runs.weights import load_trained

    with new_folder(args.out, "export", is_export, args.overwrite) as folder:
        trained = load_trained(args.run)
        write_model(trained, args.dtype, args.out.resolve().name, folder)
        if args.tokenizer:
            write_tokenizer(trained, folder)
        said = check(trained, args.dtype, args.tokenizer, folder) if args.check else []
    what = "model and tokenizer" if args.tokenizer else "model without tokenizer"
    print(f"{args.out}: {what} of {trained.folder} in {args.dtype}")
    print("\n".join(said) if said else "  not checked")


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("export_hf", UsageError):
        args = parse_arguments(argv)
    from data.errors import DataError
    from model.config import ConfigError

    with one_line_errors("export_hf", UsageError, ConfigError, DataError, OSError):
        export(args)


if __name__ == "__main__":
    main()
