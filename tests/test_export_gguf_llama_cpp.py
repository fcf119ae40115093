"""What llama.cpp makes of the file: the same ids, logits and greedy text.

For this test: pip install llama-cpp-python, which compiles llama.cpp (version 0.3.36 was used).
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_export_hf import write_weights
from test_tokenizer import NASTY

from runs.weights import load_trained
from scripts import export_gguf

llama_cpp = pytest.importorskip("llama_cpp")

SEQ_LEN = 64
OWN = {
    "tie_embeddings": False,
    "head_dim": 32,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 0.5,
        "high_freq_factor": 4.0,
        "original_max_seq_len": 200,
    },
}


@pytest.fixture(scope="module", params=[{}, OWN], ids=["tied", "untied, heads of its own"])
def weights(request, packed, tmp_path_factory) -> Path:
    shape = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": SEQ_LEN, "rope_theta": 2e3}
    return write_weights(tmp_path_factory.mktemp("w") / "w", packed, **shape | request.param)


def open_as(kind: str, weights: Path, folder: Path):
    """Export, and open in llama.cpp with keys and values in fp32, as ours are."""
    export_gguf.main([str(weights), str(folder / "m.gguf"), "--type", kind])
    return llama_cpp.Llama(
        str(folder / "m.gguf"),
        n_ctx=SEQ_LEN,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        verbose=False,
    )


def test_token_ids_are_ours_and_come_back_as_the_text(weights, tmp_path):
    opened, tokenizer = open_as("f32", weights, tmp_path), load_trained(str(weights)).tokenizer
    for text in (*NASTY.values(), "[PAD0]", "a\x00b"):
        if "\u2581" not in text:  # which it takes for a space
            ids = opened.tokenize(text.encode(), add_bos=False, special=False)
            assert ids == tokenizer.encode(text)
            assert opened.detokenize(ids).decode() == text
    assert opened.tokenize(b"1 + 2") == [tokenizer.bos_id, *tokenizer.encode("1 + 2")]
    ids = opened.tokenize("a\u2581b".encode(), add_bos=False, special=False)
    assert ids == tokenizer.encode("a b") != tokenizer.encode("a\u2581b")


@pytest.mark.parametrize(("kind", "off"), [("f32", 1e-4), ("f16", 0.1), ("q8_0", 1.0)])
def test_logits_are_ours_up_to_the_rounding_of_the_weights(weights, tmp_path, kind, off):
    opened, trained = open_as(kind, weights, tmp_path), load_trained(str(weights))
    ids = trained.tokenizer.encode("sum 7: 1 + 7 = 8; 第3句" * 9)[:SEQ_LEN]
    with torch.inference_mode():
        ours = trained.model(torch.tensor([ids])).logits[0].numpy()
    opened.eval(ids)
    its = np.array(opened.scores[: len(ids)])
    assert 0 < np.abs(its - ours).max() < off
    assert (its.argmax(1) == ours.argmax(1)).mean() > 0.9
