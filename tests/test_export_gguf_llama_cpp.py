"""What llama.cpp makes of the file: the same ids, logits and greedy text.

For this test: pip install llama-cpp-python, which compiles llama.cpp (version 0.3.36 was used).
"""

import functools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from test_tokenizer import NASTY

from data.dataset import PackedDataset
from data.tokenizer import TOKENIZER_FILE, Tokenizer
from formats.portable import load_portable, save_portable
from model import LMConfig, Transformer
from scripts import export_gguf

llama_cpp = pytest.importorskip("llama_cpp")

SEQ_LEN, LONGEST = 64, 48
PROMPTS = ("sum 7: 1 + 7 =", "sum 12: 1 + 12 = 13;", "第3句\n", "\n\n  +", "?")
OF_ITS_OWN = {
    "head_dim": 32,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 0.5,
        "high_freq_factor": 4.0,
        "original_max_seq_len": 200,
    },
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied, heads of its own"])
def weights(request, packed, tmp_path_factory) -> Path:
    """A model that has learned a little, so that greedy text is more than one token repeated."""
    torch.manual_seed(0)
    train_set = PackedDataset(packed, "train", SEQ_LEN)
    config = LMConfig(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=train_set.vocab_size,
        norm_eps=1e-4,
        rope_theta=2e3,
        max_seq_len=SEQ_LEN,
        tie_embeddings=request.param,
        **{} if request.param else OF_ITS_OWN,
    )
    model = Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        samples = [train_set[i] for i in torch.randint(len(train_set), (8,)).tolist()]
        tokens, targets = (torch.stack(part) for part in zip(*samples, strict=True))
        model(tokens, targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("model")
    save_portable(folder, config, dict(model.named_parameters()))
    shutil.copy(packed / TOKENIZER_FILE, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(packed) -> Tokenizer:
    return Tokenizer(packed / TOKENIZER_FILE)


@pytest.fixture(scope="module")
def llama(weights, tmp_path_factory):
    """Exports and opens in llama.cpp, with keys and values kept in fp32 as ours are."""

    @functools.cache
    def open_as(kind: str, folder: Path = weights):
        path = tmp_path_factory.mktemp(kind) / "m.gguf"
        export_gguf.main([str(folder), str(path), "--type", kind])
        return llama_cpp.Llama(
            str(path),
            n_ctx=SEQ_LEN,
            n_threads=1,
            n_threads_batch=1,
            logits_all=True,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            flash_attn=False,
            verbose=False,
        )

    return open_as


def its_logits(llama, ids: list[int]) -> np.ndarray:
    """(T, vocab_size)."""
    llama.reset()
    llama.eval(ids)
    return np.array(llama.scores[: len(ids)])


@torch.inference_mode()
def our_logits(model: Transformer, ids: list[int]) -> np.ndarray:
    return model(torch.tensor([ids])).logits[0].numpy()


def greedy(logits, ids: list[int]) -> list[int]:
    """The likeliest token, again and again, until there are LONGEST."""
    ids = list(ids)
    while len(ids) < LONGEST:
        ids.append(int(logits(ids)[-1].argmax()))
    return ids


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [[tokenizer.bos_id, *tokenizer.encode(prompt)] for prompt in PROMPTS]


def validation(packed: Path) -> list[list[int]]:
    val_set = PackedDataset(packed, "val", SEQ_LEN)
    return [val_set[i][0].tolist() for i in range(min(8, len(val_set)))]


def test_token_ids_are_ours_and_come_back_as_the_text(llama, tokenizer):
    opened = llama("f32")
    for text in (*NASTY.values(), "[PAD0]", "a\x00b"):
        if "\u2581" in text:
            continue  # see the next test
        ids = opened.tokenize(text.encode(), add_bos=False, special=False)
        assert ids == tokenizer.encode(text)
        assert opened.detokenize(ids).decode() == text
    assert opened.tokenize(b"1 + 2") == [tokenizer.bos_id, *tokenizer.encode("1 + 2")]


def test_the_one_character_that_it_reads_otherwise_is_sentencepieces_space_symbol(llama, tokenizer):
    """It stands for a space in the vocabulary; data.tokenizer spells a literal one in bytes."""
    opened = llama("f32")
    ids = opened.tokenize("a\u2581b".encode(), add_bos=False, special=False)
    assert ids == tokenizer.encode("a b") != tokenizer.encode("a\u2581b")
    assert opened.detokenize(tokenizer.encode("a\u2581b")).decode() == "a\u2581b"


def test_in_f32_logits_and_greedy_text_are_ours(llama, weights, tokenizer, packed):
    model, opened = load_portable(weights), llama("f32")
    for ids in [*prompts(tokenizer), *validation(packed)]:
        difference = np.abs(its_logits(opened, ids) - our_logits(model, ids)).max()
        assert difference < 1e-4
    for ids in prompts(tokenizer):
        ours = greedy(lambda ids: our_logits(model, ids), ids)
        assert greedy(lambda ids: its_logits(opened, ids), ids) == ours
        assert len(set(ours)) > 4


@pytest.mark.parametrize(("kind", "off", "agreeing"), [("f16", 0.05, 0.98), ("q8_0", 0.5, 0.9)])
def test_in_fewer_bits_logits_are_close(kind, off, agreeing, llama, weights, packed):
    model, opened = load_portable(weights), llama(kind)
    texts = validation(packed)
    pairs = [(its_logits(opened, ids), our_logits(model, ids)) for ids in texts]
    assert 0 < max(np.abs(its - ours).max() for its, ours in pairs) < off
    agree = np.mean([(its.argmax(1) == ours.argmax(1)).mean() for its, ours in pairs])
    assert agree > agreeing


def test_rows_that_are_no_whole_blocks_and_unused_pieces_can_be_read(llama, packed, tmp_path):
    torch.manual_seed(0)
    config = LMConfig(
        dim=48, n_layers=1, n_heads=4, hidden_dim=72, vocab_size=413, max_seq_len=SEQ_LEN
    )
    model = Transformer(config).eval()
    save_portable(tmp_path / "odd", config, dict(model.named_parameters()))
    shutil.copy(packed / TOKENIZER_FILE, tmp_path / "odd")
    ids = list(range(1, 50))
    its = its_logits(llama("q8_0", tmp_path / "odd"), ids)
    assert its.shape == (49, 413)
    assert np.abs(its - our_logits(model, ids)).max() < 1e-3
