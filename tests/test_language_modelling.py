import math

import pytest
import torch
from conftest import VOCAB_SIZE
from small_model import opinionated
from torch.nn import functional as F

from data.corpus import Record
from data.dataset import PackedDataset
from data.tokenizer import TOKENIZER_FILE, Tokenizer
from evaluation.language_modelling import document_rows, metrics, packed_sums, text_sums, windows
from evaluation.scoring import Scorer
from model import IGNORE_INDEX
from training.validation import validate, validation_loader

SEQ_LEN = 16
TEXTS = [
    "sum 7: 1 + 7 = 8; 2 + 7 = 9; 3 + 7 = 10; 4 + 7 = 11; 5 + 7 = 12;",  # several windows
    "1",
    "第三句 👩🏽‍🚀 \u2581\tø",
    "sum",
]


@pytest.fixture
def tokenizer(packed) -> Tokenizer:
    return Tokenizer(packed / TOKENIZER_FILE)


@pytest.fixture
def scorer(accelerator) -> Scorer:
    return Scorer(opinionated(VOCAB_SIZE, SEQ_LEN), accelerator, batch_size=4)


def documents(texts: list[str]) -> list[Record]:
    return [Record(f"{i}.txt", 0, text.encode()) for i, text in enumerate(texts)]


@pytest.mark.parametrize("stride", [1, 3, 8, 15, 16])
@pytest.mark.parametrize("length", [2, 3, 15, 16, 17, 18, 31, 32, 33, 34, 100])
def test_windows_predict_every_id_once_with_the_context_promised(length, stride):
    ids = list(range(1000, 1000 + length))
    predicted = []
    for tokens, targets in windows(ids, SEQ_LEN, stride):
        assert len(tokens) == len(targets) <= SEQ_LEN
        for i, target in enumerate(targets):
            if target == IGNORE_INDEX:
                continue
            assert target == tokens[i] + 1  # ids count up: the target follows what was read
            context, before = i + 1, target - 1000
            assert context >= min(before, SEQ_LEN - stride)
            predicted.append(target)
    assert predicted == ids[1:]


def test_a_document_that_fits_is_one_window():
    (window,) = windows([5, 6, 7], SEQ_LEN, 4)
    assert window == ([5, 6], [6, 7])


def naive_nll(model, ids: list[int], stride: int) -> float:
    """One token at a time: the context of ids[t] begins at the first window that reaches it."""
    total = 0.0
    for t in range(1, len(ids)):
        start = stride * max(0, math.ceil((t - SEQ_LEN) / stride))
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:t]])).logits[0, -1].double()
        total -= F.log_softmax(logits, dim=-1)[ids[t]].item()
    return total


@pytest.mark.parametrize("stride", [1, 5, 8, 16])
def test_documents_score_as_they_do_one_token_at_a_time(scorer, tokenizer, stride):
    ids = [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in TEXTS]
    assert len(ids[0]) > 2 * SEQ_LEN
    sums = text_sums(scorer, document_rows(documents(TEXTS), tokenizer, SEQ_LEN, stride))
    nll = sum(naive_nll(scorer.model, document, stride) for document in ids)
    n_tokens = sum(len(document) - 1 for document in ids)
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    found = metrics(sums)
    assert sums.n == len(TEXTS)
    assert sums.totals[2:].tolist() == [n_tokens, n_bytes]
    assert found["loss"].value == pytest.approx(nll / n_tokens, rel=1e-6)
    assert found["perplexity"].value == pytest.approx(math.exp(nll / n_tokens), rel=1e-5)
    assert found["bits_per_byte"].value == pytest.approx(nll / math.log(2) / n_bytes, rel=1e-6)


def test_more_context_is_another_number(scorer, tokenizer):
    losses = {
        metrics(text_sums(scorer, document_rows(documents(TEXTS), tokenizer, SEQ_LEN, stride)))[
            "loss"
        ].value
        for stride in (1, 16)
    }
    assert len(losses) == 2


def test_an_empty_document_is_none(scorer, tokenizer):
    with_empty = document_rows(documents(["", *TEXTS, ""]), tokenizer, SEQ_LEN, 8)
    sums = text_sums(scorer, with_empty)
    assert sums.n == len(TEXTS)


def test_a_model_that_knows_the_next_token_has_full_accuracy(scorer, tokenizer):
    """Every document is what the model itself would write."""
    model, ids = scorer.model, [tokenizer.bos_id]
    while len(ids) < SEQ_LEN:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))

    class Recites:
        bos_id, eos_id = tokenizer.bos_id, ids[-1]

        def encode(self, text):
            return ids[1:-1]

    found = metrics(text_sums(scorer, document_rows(documents(["x"] * 5), Recites(), SEQ_LEN, 8)))
    assert found["accuracy"] == pytest.approx((1, 1, 1))


@pytest.mark.parametrize("max_samples", [0, 7])
def test_packed_sequences_give_the_loss_of_the_training_loop(packed, scorer, max_samples):
    dataset = PackedDataset(packed, "val", SEQ_LEN)
    scored = []
    sums = packed_sums(scorer, dataset, max_samples, bos_id=1, progress=scored.append)
    loader = validation_loader(dataset, 8, max_samples, scorer.accelerator)
    loop = validate(scorer.model, loader, scorer.accelerator, dataset.bytes_per_token)
    found = metrics(sums)
    assert sum(scored) == loop["samples"] == (max_samples or len(dataset))
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert found[name].value == pytest.approx(loop[name], rel=1e-6)


def test_packed_sequences_of_one_document_are_one_unit(packed, scorer):
    dataset = PackedDataset(packed, "val", SEQ_LEN)
    stream = [token for tokens, _ in dataset for token in tokens.tolist()]
    beginnings = {stream[: i + 1].count(1) for i in range(0, len(stream), SEQ_LEN)}
    sums = packed_sums(scorer, dataset, 0, bos_id=1, progress=lambda n: None)
    assert sums.n == len(beginnings) < len(dataset)
