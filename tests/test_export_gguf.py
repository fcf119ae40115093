"""The file of scripts.export_gguf, read by the gguf package."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from conftest import VOCAB_SIZE
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from small_model import save_model
from test_export_hf import some_tokens
from transformers import AutoModelForCausalLM

from lm.data.chat_template import PLAIN_JINJA, TEMPLATE_FILE
from lm.data.tokenizer import TOKENIZER_FILE
from lm.formats.portable import load_portable, save_portable
from model import LMConfig, Transformer
from scripts import export_gguf

# No value is LMConfig's default. Rows of 96 and 160 numbers fill whole blocks of q8_0 (32 each).
SHAPE = {"dim": 96, "n_layers": 2, "n_heads": 6, "n_kv_heads": 3, "vocab_size": VOCAB_SIZE}
SHAPE |= {"hidden_dim": 160, "norm_eps": 1e-4, "rope_theta": 5e3, "max_seq_len": 40}


@pytest.fixture
def weights(packed, tmp_path):
    """Writes portable weights of SHAPE with some changes; returns their folder."""

    def write(**changes) -> Path:
        torch.manual_seed(0)
        return save_model(tmp_path / "weights", Transformer(LMConfig(**SHAPE | changes)), packed)

    return write


def export(folder: Path, *flags: str) -> gguf.GGUFReader:
    out = folder.parent / "model.gguf"
    export_gguf.main([str(folder), str(out), *flags])
    return gguf.GGUFReader(out)


def key(reader: gguf.GGUFReader, name: str):
    return reader.get_field(name).contents()


def tensors(reader: gguf.GGUFReader) -> dict[str, np.ndarray]:
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}


def types(reader: gguf.GGUFReader) -> dict[str, str]:
    return {t.name: t.tensor_type.name for t in reader.tensors}


@pytest.mark.parametrize(
    "changes",
    [  # transformers does not read another head_dim of a Qwen3
        *({"tie_embeddings": True}, {"tie_embeddings": False}, {"qk_norm": True, "head_dim": 128})
    ],
    ids=str,
)
def test_transformers_computes_equal_logits_from_the_file(weights, changes):
    folder = weights(**changes)
    model = load_portable(folder)
    for parameter in model.parameters():
        parameter.data *= torch.rand(parameter.shape[-1:]) + 0.5  # norms are not all one
    save_portable(folder, model.config, dict(model.named_parameters()))
    reader = export(folder)
    assert ("output.weight" in types(reader)) == (changes.get("tie_embeddings") is False)
    architecture = "qwen3" if "qk_norm" in changes else "llama"
    channels = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    sizes = {"vocab_size": 400, "feed_forward_length": 160}  # transformers reads all others
    sizes |= dict.fromkeys(channels, model.config.head_dim)
    assert {name: key(reader, f"{architecture}.{name}") for name in sizes} == sizes
    theirs = AutoModelForCausalLM.from_pretrained(folder.parent, gguf_file="model.gguf")
    assert theirs.config.model_type == architecture
    assert theirs.config.max_position_embeddings == 40
    tokens = some_tokens()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens).logits, atol=1e-5, rtol=0)


def test_the_tokenizer_is_stored_piece_by_piece_and_further_ids_are_unused(weights, packed):
    reader = export(weights(vocab_size=416))
    model = sentencepiece.SentencePieceProcessor(model_file=str(packed / TOKENIZER_FILE))
    ids = list(range(400))
    assert key(reader, "tokenizer.ggml.model") == "llama"
    pieces, scores = (key(reader, f"tokenizer.ggml.{name}") for name in ("tokens", "scores"))
    assert (pieces[:400], scores[:400]) == (model.id_to_piece(ids), model.get_score(ids))
    assert len(set(pieces)) == len(scores) == 416
    kinds = key(reader, "tokenizer.ggml.token_type")
    assert kinds[400:] == [gguf.TokenType.UNUSED] * 16
    for name in ("unknown", "control", "byte"):
        kind, is_kind = getattr(gguf.TokenType, name.upper()), getattr(model, f"is_{name}")
        assert [i for i in ids if kinds[i] == kind] == [i for i in ids if is_kind(i)]
    assert kinds.count(gguf.TokenType.NORMAL) == 400 - 3 - 256
    for name, id in (("bos", 1), ("eos", 2), ("unknown", 0)):
        assert key(reader, f"tokenizer.ggml.{name}_token_id") == id
    assert key(reader, "tokenizer.ggml.add_bos_token") is True
    for name in ("add_eos_token", "add_space_prefix", "remove_extra_whitespaces"):
        assert key(reader, f"tokenizer.ggml.{name}") is False


def test_rope_scaling_is_stored_as_one_factor_per_frequency(weights):
    scaling = {"low_freq_factor": 0.5, "high_freq_factor": 4.0, "original_max_seq_len": 200}
    slower = tensors(export(weights(rope_scaling={"factor": 8.0, **scaling})))["rope_freqs.weight"]
    assert slower.shape == (8,)  # half of head_dim
    assert (slower[0], slower[-1]) == (1, 8)
    assert all(slower[1:] >= slower[:-1])


def test_f16_rounds_matrices_and_q8_0_changes_them_by_about_half_a_step(weights):
    """Norms stay exact."""
    folder = weights()
    exact, rounded = tensors(export(folder)), export(folder, "--type", "f16", "--overwrite")
    assert key(rounded, "general.file_type") == gguf.LlamaFileType.MOSTLY_F16
    halves, half_types = tensors(rounded), types(rounded)
    quantized = export(folder, "--type", "q8_0", "--overwrite")
    for name, values in tensors(quantized).items():
        kinds = half_types[name], types(quantized)[name]
        if "norm" in name:
            assert kinds == ("F32", "F32")
            assert np.array_equal(values, exact[name])
            continue
        assert kinds == ("F16", "Q8_0")
        assert np.array_equal(halves[name], exact[name].astype(np.float16))
        blocks = exact[name].reshape(-1, 32)
        step = np.abs(blocks).max(axis=1, keepdims=True) / 127
        # Rounding the weight adds up to 0.5 steps, rounding the step to fp16 up to 0.062.
        assert (np.abs(values.reshape(-1, 32) - blocks) < 0.57 * step).all()
        assert not np.array_equal(values, exact[name])


def test_experts_rows_that_q8_0_cannot_store_and_other_tokenizers_are_refused(weights, refusal):
    line = refusal(export_gguf, weights(use_moe=True), "out.gguf")
    assert "experts cannot be written to GGUF: scripts.export_hf can" in line
    folder = weights(hidden_dim=150)
    line = refusal(export_gguf, folder, folder.parent / "model.gguf", "--type", "q8_0")
    assert line.endswith("rows of 150 numbers, q8_0 needs a multiple of 32: pass --type f16")
    path = folder / TOKENIZER_FILE
    model = ModelProto.FromString(path.read_bytes())
    model.trainer_spec.model_type = model.trainer_spec.UNIGRAM
    path.write_bytes(model.SerializeToString())
    assert "is not BPE" in refusal(export_gguf, folder, folder.parent / "model.gguf")


@pytest.mark.parametrize(("kind", "value"), [("f16", 1e5), ("q8_0", 1e8)])
@pytest.mark.filterwarnings("error")
def test_a_weight_too_large_for_a_type_is_refused_and_leaves_no_file(kind, value, weights, refusal):
    folder = weights()
    model = load_portable(folder)
    model.layers[0].attention.wq.weight.data[0, 0] = value
    save_portable(folder, model.config, dict(model.named_parameters()))
    line = refusal(export_gguf, folder, folder.parent / "model.gguf", "--type", kind)
    assert f"blk.0.attn_q.weight does not fit into {kind}" in line
    assert list(folder.parent.iterdir()) == [folder]


def test_an_existing_file_is_kept_and_a_failed_write_leaves_no_file(weights, small_disk, refusal):
    folder, disk = weights(), small_disk("64k")
    out = folder.parent / "model.gguf"
    out.touch()
    assert "pass --overwrite" in refusal(export_gguf, folder, out)
    assert out.read_bytes() == b""
    assert "Is a directory" in refusal(export_gguf, folder, folder, "--overwrite")
    assert "no space left" in refusal(export_gguf, folder, disk / "model.gguf")
    assert list(disk.iterdir()) == []


def test_the_file_of_a_chat_model_has_the_template_and_the_end_token_of_a_turn(weights):
    folder = weights()
    assert export(folder).get_field("tokenizer.chat_template") is None
    (folder / TEMPLATE_FILE).touch()
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    reader = export(folder, "--overwrite")
    assert key(reader, "tokenizer.chat_template") == PLAIN_JINJA  # without escapes
    ends = [key(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    assert ends == [2, 5]
