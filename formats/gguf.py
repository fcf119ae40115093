"""A model and its tokenizer in one GGUF file, for llama.cpp and what is built on it.

`python -m scripts.export_gguf --help` says how llama.cpp reads it.
"""

import errno
import os
from pathlib import Path

import gguf
import numpy as np
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from common.atomic import whole_file
from common.errors import UsageError
from data.chat_template import PLAIN_JINJA
from data.errors import DataError
from data.tokenizer import JsonTokenizer, Tokenizer
from formats.tokenizer_json import read_exact
from model.config import LMConfig
from model.rotary import rotary_frequencies
from model.transformer import Transformer

BLOCK = 32  # values that share a scale in q8_0; a row has to be made of such blocks


def add_tensors(writer: gguf.GGUFWriter, model: Transformer, wanted: str) -> list[str]:
    """Add the parameters by their names in GGUF, a tied matrix once; norms stay f32.

    Scaled rotations add the factor by which each frequency is slowed down, (head_dim/2,). Returns
    the matrices that become f16 because their rows are not whole blocks of q8_0. Raises UsageError:
    a value is too large for the type.
    """
    config, odd = model.config, []
    if config.rope_scaling:
        rope = config.head_dim, config.rope_theta
        slower = rotary_frequencies(*rope) / rotary_frequencies(*rope, config.rope_scaling)
        writer.add_tensor("rope_freqs.weight", slower.numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.n_layers)
    for ours, parameter in model.named_parameters():
        values, kind = parameter.detach().numpy(), wanted
        name = names.get_name(ours, try_suffixes=(".weight",))
        if values.ndim == 1:
            kind = "f32"
        elif wanted == "q8_0" and values.shape[-1] % BLOCK:
            kind = "f16"
            odd.append(name)
        kind = gguf.GGMLQuantizationType[kind.upper()]
        stored = gguf.quantize(values, kind)
        if not np.isfinite(gguf.dequantize(stored, kind)).all():
            raise UsageError(f"{name} does not fit into {wanted}: --type f32 keeps it exactly")
        writer.add_tensor(name, stored, raw_dtype=kind)
    return odd


def add_shape(writer: gguf.GGUFWriter, config: LMConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.hidden_dim)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)


def add_vocabulary(
    writer: gguf.GGUFWriter, vocabulary: ModelProto, tokenizer: Tokenizer, size: int
) -> None:
    """Add the pieces, then unused ones up to `size`, the model's vocabulary."""
    pieces, n_extra = vocabulary.pieces, size - len(vocabulary.pieces)
    writer.add_tokenizer_model("llama")  # GGUF's name for SentencePiece BPE
    writer.add_tokenizer_pre("default")
    writer.add_token_list([p.piece for p in pieces] + [f"[PAD{i}]" for i in range(n_extra)])
    writer.add_token_scores([p.score for p in pieces] + [0.0] * n_extra)
    # The kinds of pieces have SentencePiece's numbers.
    writer.add_token_types([p.type for p in pieces] + [gguf.TokenType.UNUSED] * n_extra)
    writer.add_unk_token_id(vocabulary.trainer_spec.unk_id)
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_add_bos_token(True)  # every document of the training began with it
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(vocabulary.normalizer_spec.add_dummy_prefix)
    writer.add_remove_extra_whitespaces(False)


def write(writer: gguf.GGUFWriter, path: Path) -> None:
    """Write the file and close it. Raises OSError: the disk is full or refuses."""
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except OSError as error:
        if error.errno is None:  # numpy's, after a short write
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    finally:
        writer.close()


@np.errstate(all="ignore")  # add_tensors refuses what overflows
def export_gguf(
    model: Transformer, tokenizer: Tokenizer, out: Path, file_type: str, chat: bool = False
) -> str:
    """Write a model and its tokenizer into one GGUF file; return a summary for the user.

    Args:
        file_type: f32, f16 or q8_0, for the matrices.
        chat: the model has learned to answer: its template is written too.

    Raises UsageError, DataError: weights or a tokenizer that the file cannot hold. OSError: the
    disk is full or refuses.
    """
    if isinstance(tokenizer, JsonTokenizer):
        raise DataError(
            f"{tokenizer.path}: only SentencePiece is written into GGUF here: export with "
            "scripts.export_hf, and have llama.cpp's convert_hf_to_gguf.py make the file of that"
        )
    writer = gguf.GGUFWriter(None, "llama")
    writer.add_name(out.stem)
    prefix = "ALL" if file_type == "f32" else "MOSTLY"
    writer.add_file_type(gguf.LlamaFileType[f"{prefix}_{file_type.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(writer, model.config)
    add_vocabulary(writer, read_exact(tokenizer), tokenizer, model.config.vocab_size)
    if chat:
        writer.add_chat_template(PLAIN_JINJA)
    odd = add_tensors(writer, model, file_type)
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(out) as partial:
        write(writer, partial)
    said = f"{file_type}, {out.stat().st_size / 1e6:.1f} MB"
    return f"{said}; f16 for rows of no whole blocks: {', '.join(odd)}" if odd else said
