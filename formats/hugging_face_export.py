"""A folder that transformers loads as a Llama, with no code of ours."""

import shutil
from pathlib import Path

import torch

from common.errors import UsageError
from data.chat_template import JINJA
from data.errors import DataError
from data.tokenizer import TOKENIZER_FILE, TOKENIZER_JSON, JsonTokenizer, Tokenizer, read_markers
from formats.hugging_face_names import llama_config, to_llama
from formats.portable import CONFIG_FILE, WEIGHTS_FILE, read_json, save_tensors, write_json
from formats.tokenizer_json import convert, without_escapes
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
in {dtype}. {learned}

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("{name}")
    tokenizer = AutoTokenizer.from_pretrained("{name}")
    {inputs}
    ids = model.generate(**inputs, max_new_tokens=50)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))

{about_tokenizer}
"""
ABOUT_CONVERTED = """\
The tokenizer begins every text with its begin marker, as the documents did in training, unless
`add_special_tokens=False`. {markers}
`tokenizer.model` is the SentencePiece model that the other files were made from; what
`LlamaTokenizer` would make of it is not exact."""
ABOUT_COPIED = """\
`tokenizer.json` is the one that the training text was prepared with, {copied}.
Documents began with the begin marker in training, whether it puts one before a text or not."""
ABOUT_TEXT = {
    "learned": "It was pretrained only: it continues text, and follows no instructions.",
    "inputs": 'inputs = tokenizer("Once upon a time", return_tensors="pt")',
    "markers": (
        "A marker's name in a text, such as `<s>`, is text and no marker; who\n"
        "reads `tokenizer.json` with the `tokenizers` package sets `encode_special_tokens = True` "
        "for that."
    ),
    "copied": "as it came",
}
ABOUT_CHAT = {
    "learned": "It was fine-tuned to answer, in the chat template of its tokenizer.",
    "inputs": """messages = [{"role": "user", "content": "What is a list?"}]
    kind = {"return_tensors": "pt", "return_dict": True}
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **kind)""",
    "markers": (
        "A marker's name in a message, such as `<s>`, is text and no marker;\n"
        "where the tokenizer itself is called, that takes `split_special_tokens=True`."
    ),
    "copied": "but for the escapes of the chat template, which it removes",
}


def is_export(folder: Path) -> bool:
    """Return True for a folder that scripts.export_hf wrote."""
    try:
        return MARK in read_json(folder / CONFIG_FILE)
    except ConfigError:
        return False


def write_model(
    folder: Path, model: Transformer, tokenizer: Tokenizer, *, dtype: str, name: str, chat: bool
) -> None:
    """Write weights in `dtype`, config, generation settings and a model card.

    Args:
        tokenizer: its begin and end markers go into config and generation settings.
        chat: the model has learned to answer.

    Raises UsageError: a weight is too large for `dtype`. OSError: the disk is full or refuses.
    """
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
    facts = {"name": name, "millions": model.num_parameters() / 1e6, "dtype": dtype}
    facts |= config.to_dict() | (ABOUT_CHAT if chat else ABOUT_TEXT)
    about_tokenizer = ABOUT_COPIED if isinstance(tokenizer, JsonTokenizer) else ABOUT_CONVERTED
    card = CARD.format(about_tokenizer=about_tokenizer.format(**facts), **facts)
    (folder / "README.md").write_text(card, encoding="utf-8")


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_seq_len: int, *, chat: bool) -> None:
    """Write tokenizer.json, what transformers wants beside it, and a SentencePiece model itself.

    Args:
        chat: the model has learned to answer: the template of its conversations is written too.

    Raises DataError: no tokenizer.json gives equal ids.
    """
    if isinstance(tokenizer, JsonTokenizer):
        copied = Path(tokenizer.path).read_text(encoding="utf-8")
        copied = without_escapes(copied) if chat else copied
        (folder / TOKENIZER_JSON).write_text(copied, encoding="utf-8")
        markers = read_markers(tokenizer.path)
    else:
        markers = _write_converted(folder, tokenizer, chat)
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


def _write_converted(folder: Path, tokenizer: Tokenizer, chat: bool) -> dict[str, str]:
    """Write tokenizer.json and the SentencePiece model that it is made from; return the piece of
    each marker by its role in transformers."""
    try:
        converted = convert(tokenizer, chat)
    except DataError as error:
        raise DataError(f"{error}; --no-tokenizer exports the weights alone") from error
    converted.save(str(folder / TOKENIZER_JSON))
    shutil.copyfile(tokenizer.path, folder / TOKENIZER_FILE)
    return {
        "bos_token": converted.id_to_token(tokenizer.bos_id),
        "eos_token": converted.id_to_token(tokenizer.eos_id),
        "unk_token": converted.model.unk_token,
    }
