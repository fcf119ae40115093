"""Write a model and its tokenizer into one GGUF file for llama.cpp and programs built on it."""

import errno
import os
from pathlib import Path

import gguf
import numpy as np
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from lm.common.atomic import whole
from lm.common.errors import UsageError
from lm.data.chat_template import PLAIN_JINJA
from lm.data.tokenizer import JsonTokenizer, Tokenizer
from lm.formats.tokenizer_json import read_exact
from lm.formats.weight_layout import OUR_ORDER, reordered, their_name
from model.config import LMConfig
from model.rotary import rotary_frequencies
from model.transformer import Transformer


def add_tensors(writer: gguf.GGUFWriter, model: Transformer, wanted: str) -> None:
    """Add the parameters under their GGUF names. Norms stay f32; a tied matrix is added once.
    Raises UsageError if a value or the length of a row does not suit the type `wanted`."""
    config = model.config
    if config.rope_scaling:
        rope = config.head_dim, config.rope_theta
        # (head_dim/2,): unscaled frequency / scaled frequency
        slower = rotary_frequencies(*rope) / rotary_frequencies(*rope, config.rope_scaling)
        writer.add_tensor("rope_freqs.weight", slower.numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[writer.arch.upper()], config.n_layers)
    for ours, parameter in model.named_parameters():
        values = parameter.detach()
        if config.qk_norm:  # llama.cpp rotates a Qwen3's channels as transformers does
            values = reordered(config, ours, values, OUR_ORDER)
        values = values.numpy()
        name = names.get_name(their_name(ours), try_suffixes=(".weight",))
        stored_as = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else wanted.upper()]
        try:
            stored = gguf.quantize(values, stored_as)
        except gguf.QuantError as error:
            rows = f"rows of {values.shape[-1]} numbers, q8_0 needs a multiple of 32"
            raise UsageError(f"{name} has {rows}: pass --type f16") from error
        if not np.isfinite(gguf.dequantize(stored, stored_as)).all():
            raise UsageError(f"{name} does not fit into {wanted}: pass --type f32")
        writer.add_tensor(name, stored, raw_dtype=stored_as)


def add_shape(writer: gguf.GGUFWriter, config: LMConfig) -> None:
    """Add the settings of the model."""
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
    """Add the pieces, then unused pieces up to `size`, the vocabulary size of the model."""
    pieces = vocabulary.pieces
    n_extra = size - len(pieces)
    writer.add_tokenizer_model("llama")  # GGUF's name for SentencePiece BPE
    writer.add_tokenizer_pre("default")
    writer.add_token_list([p.piece for p in pieces] + [f"[PAD{i}]" for i in range(n_extra)])
    writer.add_token_scores([p.score for p in pieces] + [0.0] * n_extra)
    # GGUF and SentencePiece number the types of pieces alike.
    writer.add_token_types([p.type for p in pieces] + [gguf.TokenType.UNUSED] * n_extra)
    writer.add_unk_token_id(vocabulary.trainer_spec.unk_id)
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    for id in tokenizer.more_end_ids[:1]:  # GGUF has one key for a second end token
        writer.add_eot_token_id(id)
    writer.add_add_bos_token(True)  # every document in training began with BOS
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(vocabulary.normalizer_spec.add_dummy_prefix)
    writer.add_remove_extra_whitespaces(False)


@np.errstate(all="ignore")  # add_tensors refuses values that overflow
def export_gguf(
    model: Transformer, tokenizer: Tokenizer, out: Path, file_type: str, chat: bool = False
) -> str:
    """Write a model and its tokenizer into one GGUF file, and return a summary for the user.
    Matrices have the type `file_type`: f32, f16 or q8_0. `chat` adds the chat template. Raises
    UsageError if the weights or the tokenizer cannot be exported, OSError if writing fails."""
    if isinstance(tokenizer, JsonTokenizer):
        remedy = "run scripts.export_hf, then llama.cpp's convert_hf_to_gguf.py"
        raise UsageError(f"{tokenizer.path}: only SentencePiece can be written: {remedy}")
    if model.config.use_moe:
        remedy = "scripts.export_hf can export experts for transformers, but not shared experts"
        raise UsageError(f"experts cannot be written to GGUF: {remedy}")
    writer = gguf.GGUFWriter(None, "qwen3" if model.config.qk_norm else "llama")
    writer.add_name(out.stem)
    number = "ALL_F32" if file_type == "f32" else f"MOSTLY_{file_type.upper()}"
    writer.add_file_type(gguf.LlamaFileType[number])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(writer, model.config)
    add_vocabulary(writer, read_exact(tokenizer), tokenizer, model.config.vocab_size)
    if chat:
        writer.add_chat_template(PLAIN_JINJA)
    add_tensors(writer, model, file_type)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with whole(out) as partial:
            writer.write_header_to_file(partial)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
    except OSError as error:
        number = error.errno or errno.ENOSPC  # numpy sets no errno after a short write
        raise OSError(number, os.strerror(number), str(out)) from error
    finally:
        writer.close()
    return f"{file_type}, {out.stat().st_size / 1e6:.1f} MB"
