"""A model and its tokenizer in one GGUF file, for llama.cpp and what is built on it.

What stands in it, and what llama.cpp makes of that, tells `python -m scripts.export_gguf --help`.
"""

import errno
import os
import re
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from common.atomic import whole_file
from common.errors import UsageError
from data.errors import DataError
from data.tokenizer import JsonTokenizer, Tokenizer
from model.config import LMConfig
from model.rotary import rotary_frequencies
from model.transformer import Transformer

TYPES = ("f32", "f16", "q8_0")
BLOCK = 32  # values that share a scale in q8_0; a row has to be made of such blocks
UNUSED = 5  # GGUF's for a piece that is none; for the other kinds it has SentencePiece's numbers

WHOLE_MODEL = {"tok_embeddings": "token_embd", "norm": "output_norm", "output": "output"}
IN_A_BLOCK = {
    "attention_norm": "attn_norm",
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}


class Tensor(NamedTuple):
    values: np.ndarray  # fp32
    kind: str  # as what it is stored, one of TYPES


def gguf_name(name: str) -> str:
    """A parameter's name in GGUF: layers.3.attention.wq.weight → blk.3.attn_q.weight."""
    name = name.removesuffix(".weight")
    if in_a_block := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
        number, name = in_a_block.groups()
        return f"blk.{number}.{IN_A_BLOCK[name]}.weight"
    return f"{WHOLE_MODEL[name]}.weight"


def rounding(values: np.ndarray, kind: str) -> np.ndarray | float:
    """How far each number may be off when it comes back.

    Half a unit in the last of f16's 11 bits, or of its smallest numbers. In q8_0 half of a block's
    scale, which is a 127th of its largest number and itself an f16 that is multiplied by up to 127.
    """
    if kind == "f32":
        return 0.0
    if kind == "f16":
        return np.abs(values) * 2.0**-11 + 2.0**-25
    blocks = values.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 127
    bound = scale * (0.5 + 127 * 2.0**-11) * 1.001 + 127 * 2.0**-25
    return np.broadcast_to(bound, blocks.shape).reshape(values.shape)


def read_tensors(model: Transformer, wanted: str) -> dict[str, Tensor]:
    """The parameters by their names in GGUF, a tied matrix once, and by what scaled rotations are
    slowed down. Norms stay f32, and with q8_0 rows that are not whole blocks become f16."""
    tensors, config = {}, model.config
    if config.rope_scaling:
        rope = config.head_dim, config.rope_theta
        slower = rotary_frequencies(*rope) / rotary_frequencies(*rope, config.rope_scaling)
        tensors["rope_freqs.weight"] = Tensor(slower.numpy(), "f32")
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        kind = "f16" if wanted == "q8_0" and values.shape[-1] % BLOCK else wanted
        tensors[gguf_name(name)] = Tensor(values, "f32" if values.ndim == 1 else kind)
    return tensors


def read_vocabulary(tokenizer: Tokenizer) -> ModelProto:
    """The tokenizer's pieces, and how it was made. Raises DataError: not a tokenizer that llama.cpp
    can follow."""
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
    """The pieces, and as many unused ones as the model has room for besides."""
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
    """Raises OSError: the disk is full or refuses."""
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except OSError as error:
        if error.errno is None:  # numpy's, about a file that took a part of an array only
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    finally:
        writer.close()


def largest_difference(path: Path, tensors: dict[str, Tensor]) -> float:
    """Read the file back, and compare every tensor with the model's. Raises UsageError: one is
    missing, of another type, or further off than its type explains."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    if different := sorted(stored.keys() ^ tensors.keys()):
        raise UsageError(f"the file and the model do not both hold {', '.join(different)}")
    largest = 0.0
    for name, (values, kind) in tensors.items():
        read = gguf.dequantize(stored[name].data, stored[name].tensor_type)
        if stored[name].tensor_type.name.lower() != kind or read.shape != values.shape:
            raise UsageError(f"{name} came back as {stored[name].tensor_type.name} {read.shape}")
        difference = np.abs(read - values)
        if not (difference <= rounding(values, kind)).all():  # NaN is no difference that may be
            raise UsageError(
                f"{name} does not fit into {kind}, it comes back {difference.max():.3g} off: "
                "--type f32 keeps it exactly"
            )
        largest = max(largest, float(difference.max()))
    return largest


@np.errstate(all="ignore")  # what does not fit is found when it is read back
def export_gguf(model: Transformer, tokenizer: Tokenizer, out: Path, file_type: str) -> str:
    """Write the file aside, its matrices as `file_type`, check it, and give it its name; returns
    what to tell.

    Raises UsageError, DataError: nothing that the file can hold. OSError: the disk is full or
    refuses.
    """
    vocabulary, tensors = read_vocabulary(tokenizer), read_tensors(model, file_type)
    writer = gguf.GGUFWriter(None, "llama")
    writer.add_name(out.stem)
    prefix = "ALL" if file_type == "f32" else "MOSTLY"
    writer.add_file_type(gguf.LlamaFileType[f"{prefix}_{file_type.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(writer, model.config)
    add_vocabulary(writer, vocabulary, tokenizer, model.config.vocab_size)
    for name, (values, kind) in tensors.items():
        number = gguf.GGMLQuantizationType[kind.upper()]
        writer.add_tensor(name, gguf.quantize(values, number), raw_dtype=number)
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(out) as partial:
        write(writer, partial)
        difference = largest_difference(partial, tensors)
    kinds = [tensor.kind for tensor in tensors.values()]
    counts = " and ".join(f"{kinds.count(kind)} {kind}" for kind in TYPES if kind in kinds)
    summary = (
        f"{counts} tensors, {out.stat().st_size / 1e6:.1f} MB; read back and compared, largest "
        f"difference {difference:.2g}"
    )
    return "\n".join([summary, *notes(file_type, tensors, vocabulary.normalizer_spec.name)])


def notes(file_type: str, tensors: dict[str, Tensor], normalizer: str) -> list[str]:
    """What to know about a file that is not quite what was asked for."""
    found = []
    odd = [name for name, tensor in tensors.items() if tensor.kind not in ("f32", file_type)]
    if odd:
        found.append(f"NOTE: f16, for their rows are no multiple of {BLOCK}: {', '.join(odd)}")
    if normalizer != "identity":
        found.append(
            f"NOTE: the tokenizer normalizes text ({normalizer}) and llama.cpp does not: some "
            "texts have other ids there"
        )
    return found
