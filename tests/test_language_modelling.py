import json
import math
from collections import Counter

import pytest
import torch
from conftest import VOCAB_SIZE
from small_model import opinionated
from torch.nn import functional as F

from data.corpus import Record
from data.tokenizer import TOKENIZER_FILE, Tokenizer
from evaluation.language_modelling import (
    conversation_rows,
    document_rows,
    summary,
    unit_sums,
    windows,
)
from evaluation.scoring import Scorer
from model import IGNORE_INDEX

SEQ_LEN = 16
TEXTS = [
    "sum 7: 1 + 7 = 8; 2 + 7 = 9; 3 + 7 = 10; 4 + 7 = 11; 5 + 7 = 12;",  # several windows
    "1",
    "",  # is left out
    "第三句 👩🏽‍🚀 \u2581\tø",
]


@pytest.fixture
def tokenizer(packed) -> Tokenizer:
    return Tokenizer(packed / TOKENIZER_FILE)


@pytest.fixture
def scorer(accelerator) -> Scorer:
    return Scorer(opinionated(VOCAB_SIZE, SEQ_LEN), accelerator, batch_size=4)


def documents(texts: list[str]) -> list[Record]:
    return [Record(f"{i}.txt", 0, text.encode()) for i, text in enumerate(texts)]


@pytest.mark.parametrize("stride", [1, 3, 15, 16])
@pytest.mark.parametrize("length", [2, 16, 17, 18, 33, 100])
def test_windows_predict_every_id_once_with_the_context_promised(length, stride):
    ids = list(range(1000, 1000 + length))
    predicted = []
    for tokens, targets in windows(ids, SEQ_LEN, stride):
        assert len(tokens) == len(targets) <= SEQ_LEN
        for i, target in enumerate(targets):
            if target == IGNORE_INDEX:
                continue
            assert target == tokens[i] + 1  # ids count up: the target follows what was read
            assert i + 1 >= min(target - 1000, SEQ_LEN - stride)
            predicted.append(target)
    assert predicted == ids[1:]


def naive_nll(model, ids: list[int], stride: int) -> float:
    """One token at a time: the context of ids[t] begins at the first window that reaches it."""
    total = 0.0
    for t in range(1, len(ids)):
        start = stride * max(0, math.ceil((t - SEQ_LEN) / stride))
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:t]])).logits[0, -1].double()
        total -= F.log_softmax(logits, dim=-1)[ids[t]].item()
    return total


@pytest.mark.parametrize("stride", [5, 16])
def test_documents_score_as_they_do_one_token_at_a_time(scorer, tokenizer, stride):
    texts = list(filter(None, TEXTS))
    ids = [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    assert len(ids[0]) > 2 * SEQ_LEN
    sums = unit_sums(scorer, document_rows(documents(TEXTS), tokenizer, SEQ_LEN, stride))
    nll = sum(naive_nll(scorer.model, document, stride) for document in ids)
    n_tokens = sum(len(document) - 1 for document in ids)
    n_bytes = sum(len(text.encode()) for text in texts)
    found = summary(sums, "texts")
    assert (found["units"], found["tokens"], found["bytes"]) == (len(texts), n_tokens, n_bytes)
    metrics = {name: estimate.value for name, estimate in found["metrics"].items()}
    assert metrics["loss"] == pytest.approx(nll / n_tokens, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(nll / n_tokens), rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(nll / math.log(2) / n_bytes, rel=1e-6)


def test_a_model_that_knows_the_next_token_has_full_accuracy(scorer, tokenizer):
    """Every document is what the model itself would write."""
    ids = [tokenizer.bos_id]
    while len(ids) < SEQ_LEN:
        ids.append(int(scorer.model(torch.tensor([ids])).logits[0, -1].argmax()))

    class Recites:
        bos_id, eos_id = tokenizer.bos_id, ids[-1]

        def encode(self, text):
            return ids[1:-1]

    sums = unit_sums(scorer, document_rows(documents(["x"] * 5), Recites(), SEQ_LEN, 8))
    assert summary(sums, "x")["metrics"]["accuracy"].value == 1


def test_a_conversation_is_cut_after_the_last_answer_that_fits(tokenizer):
    conversations = [["23"], ["4" * 40], ["56", "7" * 40]]
    records = []
    for answers in conversations:
        turns = [
            {"role": role, "content": content}
            for answer in answers
            for role, content in (("user", "1"), ("assistant", answer))
        ]
        records.append(Record("c.jsonl", 1, json.dumps({"messages": turns}).encode()))
    counts = Counter()
    rows = list(conversation_rows(records, tokenizer, 2 * SEQ_LEN, counts))
    assert counts == {"left_out": 1, "cut": 1}
    assert [(row.unit, row.n_bytes) for row in rows] == [(0, 2), (2, 2)]
    for row, answer in zip(rows, ("23", "56"), strict=True):
        said = row.targets[row.targets != IGNORE_INDEX].tolist()
        assert tokenizer.decode(said[:-1]) == answer
        assert said[-1] == tokenizer.eos_id == row.targets[-1]
        assert row.tokens[1:][row.targets[:-1] != IGNORE_INDEX].tolist() == said[:-1]
