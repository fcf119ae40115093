"""Read and write a Hugging Face folder: config.json, weights and tokenizer."""

import shutil
from itertools import chain
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from lm.common.errors import UsageError
from lm.data.tokenizer import TOKENIZER_FILE, TOKENIZER_JSON, JsonTokenizer, Tokenizer, read_markers
from lm.formats.config_json import config_json_of, read_config_json
from lm.formats.portable import (
    CONFIG_FILE,
    GENERATION_FILE,
    WEIGHTS_FILE,
    load_tensors,
    read_json,
    save_tensors,
    write_json,
)
from lm.formats.tokenizer_json import convert, exported_jinja, read_exact, remove_escapes
from lm.formats.weight_layout import THEIR_ORDER, our_weights, reordered, to_hugging_face
from model.config import LMConfig
from model.transformer import Transformer


def inert_weights(config: LMConfig) -> dict[str, Tensor]:
    """Return an empty shared expert's weights for each layer of a Qwen2-MoE, {} for others."""
    shapes = {"_gate": (1, config.dim), ".gate_proj": (0, config.dim)}
    shapes |= {".up_proj": (0, config.dim), ".down_proj": (config.dim, 0)}
    layers = range(config.n_layers if config.use_moe and not config.qk_norm else 0)
    return {
        f"model.layers.{i}.mlp.shared_expert{name}.weight": torch.zeros(shape)
        for i in layers
        for name, shape in shapes.items()
    }


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights, in the order in which transformers looks for them.
    Other files, such as shards of an older version, are not read. Raises UsageError if there is
    none."""
    for name in (WEIGHTS_FILE, "pytorch_model.bin"):
        if (folder / name).exists():
            return [folder / name]
        if (index := folder / f"{name}.index.json").exists():
            named = read_json(index).get("weight_map", {})  # weight → shard
            return [folder / shard for shard in sorted(set(named.values()))]
    missing = f"no {WEIGHTS_FILE} and no {WEIGHTS_FILE}.index.json"
    raise UsageError(f"{folder}: {missing}: download the whole folder")


def read_hugging_face(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face folder with our names and our order of rows."""
    config = read_config_json(folder)
    parts = chain(*(load_tensors(file).items() for file in weight_files(folder)))
    found = our_weights(parts, str(folder))
    weights = {name: reordered(config, name, x, THEIR_ORDER) for name, x in found.items()}
    output = weights.get("output.weight") if config.tie_embeddings else None
    if output is not None and not torch.equal(output, weights.get("tok_embeddings.weight", output)):
        raise UsageError(f"{folder}: config.json ties the embeddings, but lm_head differs")
    return weights


MARK = "exported_by"  # this key in config.json allows --overwrite to replace the folder


def write_model(folder: Path, model: Transformer, tokenizer: Tokenizer, dtype: str) -> None:
    """Write weights and settings. Raises UsageError for shared experts or overflowing weights."""
    config = model.config
    if config.n_shared_experts:
        raise UsageError("transformers has no Llama with shared experts: no export is possible")
    precision = getattr(torch, dtype)
    weights = {key: p.detach().to(precision) for key, p in model.named_parameters()}
    for key, weight in weights.items():
        if not weight.isfinite().all():
            raise UsageError(f"{key} does not fit into {dtype}: pass --dtype float32")
    inert = {key: weight.to(precision) for key, weight in inert_weights(config).items()}
    save_tensors(folder / WEIGHTS_FILE, to_hugging_face(config, weights) | inert)
    values = config_json_of(config, dtype, tokenizer.bos_id, tokenizer.eos_id)
    write_json(folder / CONFIG_FILE, values | {MARK: "scripts.export_hf"})
    generation = {name: values[name] for name in ("bos_token_id", "eos_token_id")}
    if tokenizer.more_end_ids:
        generation["eos_token_id"] = [tokenizer.eos_id, *tokenizer.more_end_ids]
    write_json(folder / GENERATION_FILE, generation)


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_seq_len: int, *, chat: bool) -> None:
    """Write tokenizer.json and its settings for transformers. `chat` adds the chat template.
    Raises UsageError if no tokenizer.json can give equal ids."""
    file, own = folder / TOKENIZER_JSON, tokenizer.chat_template
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json unchanged
        "model_max_length": max_seq_len,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",  # generation goes on at the right
        "chat_template": own and own.source,
    }
    if isinstance(tokenizer, JsonTokenizer):
        shutil.copyfile(tokenizer.path, file)
        converted = tokenizers.Tokenizer.from_file(tokenizer.path)
        markers = own.tokens if own else read_markers(tokenizer.path)  # a template may name more
    else:
        converted = convert(tokenizer)
        converted.save(str(file))
        shutil.copyfile(tokenizer.path, folder / TOKENIZER_FILE)
        markers = {
            "bos_token": converted.id_to_token(tokenizer.bos_id),
            "eos_token": converted.id_to_token(tokenizer.eos_id),
            "unk_token": converted.model.unk_token,
        }
        # Without this setting, a file of llama.cpp's converter puts a space before every text.
        model = read_exact(tokenizer)
        settings["add_prefix_space"] = model.normalizer_spec.add_dummy_prefix
    if own is None or "pad_token" not in own.source:  # else the template would render other text
        # A batch needs a piece to fill rows with; its mask hides these pieces.
        markers = {"pad_token": markers.get("unk_token", markers["eos_token"])} | markers
    write_json(folder / "special_tokens_map.json", markers)
    if chat:
        remove_escapes(converted)
        converted.save(str(file))
        added = converted.get_added_tokens_decoder().values()
        special = (token.content for token in added if token.special)
        settings["chat_template"] = exported_jinja(special)
    write_json(folder / "tokenizer_config.json", markers | settings)
