"""A folder that transformers loads as a Llama, with no code of ours."""

import shutil
from pathlib import Path

import torch

from data.errors import DataError
from data.tokenizer import TOKENIZER_FILE, TOKENIZER_JSON, JsonTokenizer, Tokenizer, read_markers
from formats.hugging_face_names import llama_config, to_llama
from formats.portable import CONFIG_FILE, WEIGHTS_FILE, read_json, save_tensors, write_json
from formats.tokenizer_json import convert
from model.config import ConfigError
from model.transformer import Transformer

MARK = "exported_by"  # in config.json: what may be replaced with --overwrite
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

{about_tokenizer}
"""
ABOUT_CONVERTED = """\
The tokenizer begins every text with its begin marker, as the documents did in training, unless
`add_special_tokens=False`. A marker's name in a text, such as `<s>`, is text and no marker; who
reads `tokenizer.json` with the `tokenizers` package sets `encode_special_tokens = True` for that.
`tokenizer.model` is the SentencePiece model that the other files were made from; what
`LlamaTokenizer` would make of it is not exact."""
ABOUT_COPIED = """\
`tokenizer.json` is the one that the training text was prepared with, as it came. Documents began
with the begin marker in training, whether it puts one before a text or not."""


def is_export(folder: Path) -> bool:
    """Whether this folder was written here."""
    try:
        return MARK in read_json(folder / CONFIG_FILE)
    except ConfigError:
        return False


def write_model(
    folder: Path, model: Transformer, tokenizer: Tokenizer, *, dtype: str, name: str
) -> None:
    """Weights in `dtype`, config, generation settings with the tokenizer's begin and end markers,
    and a model card. Raises OSError: the disk is full or refuses."""
    config = model.config
    kind = getattr(torch, dtype)
    weights = {key: p.detach().to(kind) for key, p in model.named_parameters()}
    save_tensors(folder / WEIGHTS_FILE, to_llama(config, weights))
    values = llama_config(config, dtype, tokenizer.bos_id, tokenizer.eos_id)
    write_json(folder / CONFIG_FILE, values | {MARK: "scripts.export_hf"})
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    write_json(folder / "generation_config.json", generation)
    millions = model.num_parameters() / 1e6
    about = ABOUT_COPIED if isinstance(tokenizer, JsonTokenizer) else ABOUT_CONVERTED
    facts = config.to_dict() | {"millions": millions, "about_tokenizer": about}
    card = CARD.format(name=name, dtype=dtype, **facts)
    (folder / "README.md").write_text(card, encoding="utf-8")


def write_converted(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """tokenizer.json and the SentencePiece model that it is made from; returns role → piece of the
    markers. Raises DataError: there is no exact equal."""
    try:
        converted = convert(tokenizer)
    except DataError as error:
        raise DataError(f"{error}; --no-tokenizer exports the weights alone") from error
    converted.save(str(folder / TOKENIZER_JSON))
    shutil.copyfile(tokenizer.path, folder / TOKENIZER_FILE)
    return {
        "bos_token": converted.id_to_token(tokenizer.bos_id),
        "eos_token": converted.id_to_token(tokenizer.eos_id),
        "unk_token": converted.model.unk_token,
    }


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_seq_len: int) -> None:
    """tokenizer.json, what transformers wants beside it, and the SentencePiece model itself, if it
    is one. Raises DataError: a tokenizer that has no exact equal."""
    if isinstance(tokenizer, JsonTokenizer):
        shutil.copyfile(tokenizer.path, folder / TOKENIZER_JSON)
        markers = read_markers(tokenizer.path)
    else:
        markers = write_converted(folder, tokenizer)
    write_json(folder / "special_tokens_map.json", markers)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
        "model_max_length": max_seq_len,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # "<s>" in a text is text
    }
    write_json(folder / "tokenizer_config.json", markers | settings)
