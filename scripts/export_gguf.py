"""Write a model and its tokenizer into one GGUF file, for llama.cpp and what is built on it.

python -m scripts.export_gguf out/runs/NAME model.gguf --type q8_0

The keys are those of llama.cpp's "llama" architecture, see
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. It turns pairs of neighbouring channels,
as this model does, so that wq and wk go in as they are. A tied output layer is left out: without
one, llama.cpp takes the embedding.

llama.cpp's token ids are those of data.tokenizer, but where the text holds U+2581, which it takes
for a space, or where it is told to look for control pieces such as <s> in the text.
"""

import argparse
import errno
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import UsageError, one_line_errors
from common.parser import OneLineParser
from data.errors import DataError
from data.tokenizer import Tokenizer
from model import ConfigError, LMConfig, Transformer

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


class Vocabulary(NamedTuple):
    """A SentencePiece model as GGUF wants it: three lists as long as the model's embedding."""

    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    unk_id: int
    bos_id: int
    eos_id: int
    space_prefix: bool  # whether a space is put before the text
    removes_spaces: bool  # whether runs of them become one
    normalizer: str  # SentencePiece's name of what it does to characters first; llama.cpp does not


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m scripts.export_gguf", description=__doc__)
    parser.add_argument(
        "run",
        metavar="RUN",
        help="a run, a checkpoint or a folder of weights; 'auto' is the newest run",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write, as in model.gguf")
    parser.add_argument(
        "--type",
        choices=TYPES,
        default="f32",
        help="of the matrices: 4, 2 or about 1 byte per number; f32 is exact",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT")
    args = parser.parse_args(argv)
    if args.out.is_dir():
        parser.error(f"{args.out} is a folder: name the file, as in {args.out / 'model.gguf'}")
    if args.out.exists() and not args.overwrite:
        parser.error(f"{args.out} exists: pass --overwrite to replace it")
    return args


def gguf_name(name: str) -> str:
    """A parameter's name in GGUF: layers.3.attention.wq.weight → blk.3.attn_q.weight."""
    name = name.removesuffix(".weight")
    if in_a_block := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
        number, name = in_a_block.groups()
        return f"blk.{number}.{IN_A_BLOCK[name]}.weight"
    return f"{WHOLE_MODEL[name]}.weight"


def stored_type(values: np.ndarray, wanted: str) -> str:
    """Norms stay f32, and with q8_0 rows that are not whole blocks become f16."""
    if values.ndim == 1:
        return "f32"
    return "f16" if wanted == "q8_0" and values.shape[-1] % BLOCK else wanted


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
    """The parameters by their names in GGUF, a tied matrix once."""
    tensors = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        tensors[gguf_name(name)] = Tensor(values, stored_type(values, wanted))
    return tensors


def read_vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The tokenizer's pieces, and as many unused ones as the model has room for besides.

    Raises:
        DataError: not a tokenizer that llama.cpp can follow.
    """
    from sentencepiece import sentencepiece_model_pb2

    content = Path(tokenizer.path).read_bytes()
    model = sentencepiece_model_pb2.ModelProto.FromString(content)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if trainer.model_type != trainer.BPE:
        kind = trainer.ModelType.Name(trainer.model_type)
        raise DataError(f"{tokenizer.path} is a {kind} model: only BPE can be exported")
    if not trainer.byte_fallback:
        raise DataError(f"{tokenizer.path} has no pieces for bytes, and llama.cpp needs them")
    n_extra = size - len(model.pieces)
    return Vocabulary(
        [piece.piece for piece in model.pieces] + [f"[PAD{i}]" for i in range(n_extra)],
        [piece.score for piece in model.pieces] + [0.0] * n_extra,
        [piece.type for piece in model.pieces] + [UNUSED] * n_extra,
        trainer.unk_id,
        tokenizer.bos_id,
        tokenizer.eos_id,
        normalizer.add_dummy_prefix,
        normalizer.remove_extra_whitespaces,
        normalizer.name,
    )


def add_shape(writer, config: LMConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.hidden_dim)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)


def add_vocabulary(writer, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("llama")  # GGUF's name for SentencePiece BPE
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary.pieces)
    writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.kinds)
    writer.add_unk_token_id(vocabulary.unk_id)
    writer.add_bos_token_id(vocabulary.bos_id)
    writer.add_eos_token_id(vocabulary.eos_id)
    writer.add_add_bos_token(True)  # every document of the training began with it
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(vocabulary.space_prefix)
    writer.add_remove_extra_whitespaces(vocabulary.removes_spaces)


def write(
    path: Path,
    name: str,
    file_type: str,
    config: LMConfig,
    vocabulary: Vocabulary,
    tensors: dict[str, Tensor],
) -> None:
    """The file: what it is, shape, vocabulary, tensors."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    prefix = "ALL" if file_type == "f32" else "MOSTLY"
    writer.add_file_type(gguf.LlamaFileType[f"{prefix}_{file_type.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(writer, config)
    add_vocabulary(writer, vocabulary)
    for tensor, (values, kind) in tensors.items():
        number = gguf.GGMLQuantizationType[kind.upper()]
        writer.add_tensor(tensor, gguf.quantize(values, number), raw_dtype=number)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except OSError as error:
        if error.errno is None:  # numpy's, about a file that took a part of an array only
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise
    finally:
        writer.close()


def largest_difference(path: Path, tensors: dict[str, Tensor]) -> float:
    """Read the file back, and compare every tensor with the model's.

    Raises:
        UsageError: one is missing, of another type, or further off than its type explains.
    """
    import gguf

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


def export(run: str, out: Path, file_type: str) -> str:
    """Write the file aside, check it, and give it its name; returns what to tell.

    Raises:
        UsageError, ConfigError, DataError: nothing to export, or nothing that the file can hold.
        OSError: the disk.
    """
    from runs.weights import load_trained

    trained = load_trained(run)
    config = trained.model.config
    vocabulary = read_vocabulary(trained.tokenizer, config.vocab_size)
    tensors = read_tensors(trained.model, file_type)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        with np.errstate(all="ignore"):  # what does not fit is found when it is read back
            write(partial, out.stem, file_type, config, vocabulary, tensors)
            difference = largest_difference(partial, tensors)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    kinds = [tensor.kind for tensor in tensors.values()]
    counts = " and ".join(f"{kinds.count(kind)} {kind}" for kind in TYPES if kind in kinds)
    summary = (
        f"{out}: {trained.folder} as {counts} tensors, {out.stat().st_size / 1e6:.1f} MB; read "
        f"back and compared, largest difference {difference:.2g}"
    )
    return "\n".join([summary, *notes(file_type, tensors, vocabulary)])


def notes(file_type: str, tensors: dict[str, Tensor], vocabulary: Vocabulary) -> list[str]:
    """What to know about a file that is not quite what was asked for."""
    found = []
    odd = [name for name, tensor in tensors.items() if tensor.kind not in ("f32", file_type)]
    if odd:
        found.append(f"NOTE: f16, for their rows are no multiple of {BLOCK}: {', '.join(odd)}")
    if vocabulary.normalizer != "identity":
        found.append(
            f"NOTE: the tokenizer normalizes text ({vocabulary.normalizer}) and llama.cpp does "
            "not: some texts have other ids there"
        )
    return found


def main(argv: list[str] | None = None) -> None:
    with one_line_errors("export_gguf", UsageError, ConfigError, DataError, OSError):
        args = parse_arguments(argv)
        print(export(args.run, args.out, args.type))


if __name__ == "__main__":
    main()
