"""A model and its tokenizer in one GGUF file, for llama.cpp and what is built on it.

`python -m scripts.export_gguf --help` says how llama.cpp reads it.
"""

import errno
import os
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from common.atomic import whole_file
from common.errors import UsageError
from data.chat_template import PLAIN_JINJA
from data.errors import DataError
from data.tokenizer import JsonTokenizer, Tokenizer
from model.config import LMConfig
from model.rotary import rotary_frequencies
from model.transformer import Transformer

TYPES = ("f32", "f16", "q8_0")
BLOCK = 32  # values that share a scale in q8_0; a row has to be made of such blocks
UNUSED = 5  # GGUF's kind of a piece without text; the other kinds have SentencePiece's numbers


class Tensor(NamedTuple):
    values: np.ndarray  # fp32
    kind: str  # how it is stored, one of TYPES


def read_tensors(model: Transformer, wanted: str) -> dict[str, Tensor]:
    """Return the parameters by their names in GGUF, a tied matrix once; norms stay f32.

    With q8_0 a matrix whose rows are not whole blocks becomes f16. Scaled rotations add the factor
    by which each frequency is slowed down, (head_dim/2,).
    """
    tensors, config = {}, model.config
    if config.rope_scaling:
        rope = config.head_dim, config.rope_theta
        slower = rotary_frequencies(*rope) / rotary_frequencies(*rope, config.rope_scaling)
        tensors["rope_freqs.weight"] = Tensor(slower.numpy(), "f32")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.n_layers)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        kind = "f16" if wanted == "q8_0" and values.shape[-1] % BLOCK else wanted
        theirs = names.get_name(name, try_suffixes=(".weight",))
        tensors[theirs] = Tensor(values, "f32" if values.ndim == 1 else kind)
    return tensors


def read_vocabulary(tokenizer: Tokenizer) -> ModelProto:
    """Return a SentencePiece model's pieces and settings. Raises DataError: a tokenizer that
    llama.cpp cannot follow."""
    if isinstance(tokenizer, JsonTokenizer):
        raise DataError(
            f"{tokenizer.path}: only SentencePiece is written into GGUF here: export with "
            "scripts.export_hf, and have llama.cpp's convert_hf_to_gguf.py make the file of that"
        )
    model = ModelProto.FromString(Path(tokenizer.path).read_bytes())
    trainer = model.trainer_spec
    if trainer.model_type != trainer.BPE:
        kind = trainer.ModelType.Name(trainer.model_type)
        raise DataError(f"{tokenizer.path} is a {kind} model: only BPE can be exported")
    if not trainer.byte_fallback:
        raise DataError(f"{tokenizer.path} has no pieces for bytes, and llama.cpp needs them")
    return model


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
    writer.add_token_types([p.type for p in pieces] + [UNUSED] * n_extra)
    writer.add_unk_token_id(vocabulary.trainer_spec.unk_id)
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_add_bos_token(True)  # every document of the training began with it
    writer.add_add_eos_token(False)
    normalizer = vocabulary.normalizer_spec
    writer.add_add_space_prefix(normalizer.add_dummy_prefix)
    writer.add_remove_extra_whitespaces(normalizer.remove_extra_whitespaces)


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


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> float:
    """Add a tensor as its kind; return the largest difference that rounding makes. Raises
    UsageError: a value is too large for the kind."""
    kind = gguf.GGMLQuantizationType[tensor.kind.upper()]
    stored = gguf.quantize(tensor.values, kind)
    difference = np.abs(gguf.dequantize(stored, kind) - tensor.values).max()
    if not np.isfinite(difference):
        raise UsageError(f"{name} does not fit into {tensor.kind}: --type f32 keeps it exactly")
    writer.add_tensor(name, stored, raw_dtype=kind)
    return float(difference)


@np.errstate(all="ignore")  # add_tensor refuses what overflows
def export_gguf(
    model: Transformer, tokenizer: Tokenizer, out: Path, file_type: str, chat: bool = False
) -> str:
    """Write a model and its tokenizer into one GGUF file; return a summary for the user.

    Args:
        file_type: one of TYPES, for the matrices.
        chat: the model has learned to answer: its template is written too.

    Raises UsageError, DataError: weights or a tokenizer that the file cannot hold. OSError: the
    disk is full or refuses.
    """
    vocabulary, tensors = read_vocabulary(tokenizer), read_tensors(model, file_type)
    writer = gguf.GGUFWriter(None, "llama")
    writer.add_name(out.stem)
    prefix = "ALL" if file_type == "f32" else "MOSTLY"
    writer.add_file_type(gguf.LlamaFileType[f"{prefix}_{file_type.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(writer, model.config)
    add_vocabulary(writer, vocabulary, tokenizer, model.config.vocab_size)
    if chat:
        writer.add_chat_template(PLAIN_JINJA)
    difference = max(add_tensor(writer, name, tensor) for name, tensor in tensors.items())
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(out) as partial:
        write(writer, partial)
    kinds = [tensor.kind for tensor in tensors.values()]
    counts = " and ".join(f"{kinds.count(kind)} {kind}" for kind in TYPES if kind in kinds)
    size = out.stat().st_size / 1e6
    lines = [f"{counts} tensors, {size:.1f} MB; largest difference {difference:.2g}"]
    odd = [name for name, tensor in tensors.items() if tensor.kind not in ("f32", file_type)]
    if odd:
        lines.append(f"NOTE: f16, for their rows are no multiple of {BLOCK}: {', '.join(odd)}")
    if (normalizer := vocabulary.normalizer_spec.name) != "identity":
        lines.append(
            f"NOTE: the tokenizer normalizes text ({normalizer}) and llama.cpp does not: some "
            "texts have other ids there"
        )
    return "\n".join(lines)
