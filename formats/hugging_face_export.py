"""A folder that transformers loads as a Llama, with no code of ours."""

import shutil
from pathlib import Path

import torch

from common.errors import UsageError
from data.chat_template import JINJA
from data.tokenizer import TOKENIZER_FILE, TOKENIZER_JSON, JsonTokenizer, Tokenizer, read_markers
from formats.hugging_face_names import llama_config, to_llama
from formats.portable import CONFIG_FILE, WEIGHTS_FILE, read_json, save_tensors, write_json
from formats.tokenizer_json import convert, without_escapes
from model.transformer import Transformer

MARK = "exported_by"  # in config.json: what may be replaced with --overwrite
CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A Llama of {millions:.2f} million parameters with a context of {max_seq_len:,} tokens, in {dtype}.

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("{name}")
    tokenizer = AutoTokenizer.from_pretrained("{name}")
    inputs = {inputs}
    ids = model.generate(**inputs, max_new_tokens=50)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))
"""
TEXT_INPUTS = 'tokenizer("Once upon a time", return_tensors="pt")'
CHAT_INPUTS = """tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is a list?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )"""


def is_export(folder: Path) -> bool:
    """Return True for a folder that scripts.export_hf wrote."""
    config = folder / CONFIG_FILE
    return config.exists() and MARK in read_json(config)


def write_model(
    folder: Path, model: Transformer, tokenizer: Tokenizer, *, dtype: str, name: str, chat: bool
) -> None:
    """Write weights in `dtype`, config and generation settings with the tokenizer's markers, and a
    model card, which says whether the model answers (`chat`). Raises UsageError: a weight is too
    large for `dtype`. OSError: the disk is full or refuses."""
    config = model.config
    kind = getattr(torch, dtype)
    weights = {key: p.detach().to(kind) for key, p in model.named_parameters()}
    for key, weight in weights.items():
        if not weight.isfinite().all():
            raise UsageError(f"{key} does not fit into {dtype}: --dtype float32 keeps it exactly")
    save_tensors(folder / WEIGHTS_FILE, to_llama(config, weights))
    values = llama_config(config, dtype, tokenizer.bos_id, tokenizer.eos_id)
    write_json(folder / CONFIG_FILE, values | {MARK: "scripts.export_hf"})
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    write_json(folder / "generation_config.json", generation)
    card = CARD.format(
        name=name,
        millions=model.num_parameters() / 1e6,
        max_seq_len=config.max_seq_len,
        dtype=dtype,
        inputs=CHAT_INPUTS if chat else TEXT_INPUTS,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_seq_len: int, *, chat: bool) -> None:
    """Write tokenizer.json, what transformers wants beside it, and a SentencePiece model itself;
    with `chat` the template too. Raises DataError: no tokenizer.json gives equal ids."""
    if isinstance(tokenizer, JsonTokenizer):
        copied = Path(tokenizer.path).read_text(encoding="utf-8")
        copied = without_escapes(copied) if chat else copied
        (folder / TOKENIZER_JSON).write_text(copied, encoding="utf-8")
        markers = read_markers(tokenizer.path)
    else:
        converted = convert(tokenizer, chat)
        converted.save(str(folder / TOKENIZER_JSON))
        shutil.copyfile(tokenizer.path, folder / TOKENIZER_FILE)
        markers = {
            "bos_token": converted.id_to_token(tokenizer.bos_id),
            "eos_token": converted.id_to_token(tokenizer.eos_id),
            "unk_token": converted.model.unk_token,
        }
    write_json(folder / "special_tokens_map.json", markers)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
        "model_max_length": max_seq_len,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        # "<s>" in a text is text. In a conversation the template itself sees to that.
        "split_special_tokens": not chat,
    }
    if chat:
        settings["chat_template"] = JINJA
    write_json(folder / "tokenizer_config.json", markers | settings)
