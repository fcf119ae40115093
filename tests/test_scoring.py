"""Rows get correct scores, and texts and conversations become correct rows."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import VOCAB_SIZE
from small_model import opinionated
from torch.nn import functional as F

from lm.data.corpus import Record
from lm.data.tokenizer import Tokenizer
from lm.evaluation import scoring
from lm.evaluation.rows import conversation_rows, document_rows
from lm.evaluation.scoring import Row, Scorer, ratio, summary
from model import IGNORE_INDEX, Transformer

SEQ_LEN = 16
TEXTS = [
    "sum 7: 1 + 7 = 8; 2 + 7 = 9; 3 + 7 = 10; 4 + 7 = 11; 5 + 7 = 12;",  # several windows
    "1",
    "",  # is left out
    "第三句 👩🏽‍🚀 \u2581\tø",
]


@pytest.fixture
def scorer(accelerator) -> Scorer:
    return Scorer(opinionated(VOCAB_SIZE, SEQ_LEN), accelerator, batch_size=2)


def rows_of(texts: list[str], tokenizer: Tokenizer, stride: int) -> Iterator[Row]:
    records = [Record(f"{i}.txt", 0, text.encode()) for i, text in enumerate(texts)]
    return document_rows(records, tokenizer, SEQ_LEN, stride, {})


def naive(model: Transformer, ids: list[int], stride: int) -> tuple[float, int]:
    """Score token by token: return the negative log-likelihood and the number of hits. The first
    window that predicts ids[t] gives the context of ids[t]."""
    nll, hits = 0.0, 0
    for t in range(1, len(ids)):
        start = stride * max(0, math.ceil((t - SEQ_LEN) / stride))
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:t]])).logits[0, -1].double()
        nll -= F.log_softmax(logits, dim=-1)[ids[t]].item()
        hits += int(logits.argmax()) == ids[t]
    return nll, hits


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_document_scores_equal_those_of_scoring_one_token_at_a_time(
    scorer, tokenizer, stride, monkeypatch
):
    """Blocks of 3 rows end inside a document; the rows of a batch differ in length."""
    monkeypatch.setattr(scoring, "BLOCK_ROWS", 3)
    texts, read = list(filter(None, TEXTS)), []
    ids = [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    assert len(ids[0]) > 2 * SEQ_LEN
    rows = rows_of([*TEXTS[1:], TEXTS[0]], tokenizer, stride)
    units = scorer.units(read.append(row) or row for row in rows)
    first = next(units)
    assert len(read) == 3  # a block is scored before the next block is read
    units = [first, *units]
    naive_scores = [naive(scorer.model, document, stride) for document in [*ids[1:], ids[0]]]
    for (_, scores), expected in zip(units, naive_scores, strict=True):
        assert tuple(scores[:, :2].sum(axis=0)) == pytest.approx(expected, rel=1e-6)
    assert scorer.accelerator._dataloaders == []  # no block stays in memory
    found, (nll, hits) = summary(units), map(sum, zip(*naive_scores, strict=True))
    n_tokens = sum(len(document) - 1 for document in ids)
    n_bytes = sum(len(text.encode()) for text in texts)
    assert (found["units"], found["tokens"], found["bytes"]) == (len(texts), n_tokens, n_bytes)
    metrics = {name: metric["value"] for name, metric in found["metrics"].items()}
    assert metrics["accuracy"] == pytest.approx(hits / n_tokens)
    assert metrics["loss"] == pytest.approx(nll / n_tokens, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(nll / n_tokens), rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(nll / math.log(2) / n_bytes, rel=1e-6)


def test_bfloat16_scores_are_close_but_not_equal_to_fp32_scores(scorer, tokenizer):
    exact, rounded = (
        summary([*replace(scorer, dtype=dtype).units(rows_of(TEXTS, tokenizer, 4))])["metrics"]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert exact["loss"]["value"] != rounded["loss"]["value"]
    assert rounded["loss"]["value"] == pytest.approx(exact["loss"]["value"], rel=0.02)


class Squeezing(Tokenizer):
    """A tokenizer that makes one space of several, as SentencePiece does by default."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return super().encode_batch([re.sub(" +", " ", text) for text in texts])


def test_what_the_tokenizer_changes_is_counted_and_has_the_bytes_that_are_scored(tokenizer):
    changing, counts = Squeezing(tokenizer.path), Counter()
    records = [Record("a.txt", "a.txt", text) for text in (b"1  +   1", b"1 + 1")]
    rows = list(document_rows(records, changing, SEQ_LEN, SEQ_LEN, counts))
    assert counts == {"changed_by_tokenizer": 1}
    assert [row.n_bytes for row in rows] == [5, 5]
    raw = json.dumps({"prompt": "1  +  1", "response": "2"}).encode()
    rows = list(conversation_rows([Record("c.jsonl", "c.jsonl", raw)], changing, 99, counts))
    assert counts["changed_by_tokenizer"] == 2
    assert len(rows) == 1


def test_a_conversation_is_cut_after_the_last_answer_that_fits(tokenizer):
    records = []
    for answers in (["23"], ["4" * 40], ["56", "7" * 40]):
        said = [("user", "1"), ("assistant", answers[0]), ("user", "1"), ("assistant", answers[-1])]
        turns = [{"role": role, "content": text} for role, text in said[: 2 * len(answers)]]
        records.append(Record("c.jsonl", "c.jsonl", json.dumps({"messages": turns}).encode()))
    counts = Counter()
    rows = list(conversation_rows(records, tokenizer, 2 * SEQ_LEN, counts))
    assert counts == {"left_out": 1, "cut": 1}
    assert [(row.unit, row.n_bytes) for row in rows] == [(0, 2), (2, 2)]
    just_fits = len(rows[0].tokens)
    for seq_len, n_rows in ((just_fits, 1), (just_fits - 1, 0)):
        assert len([*conversation_rows(records[:1], tokenizer, seq_len, counts)]) == n_rows
    for row, answer in zip(rows, ("23", "56"), strict=True):
        said = row.targets[row.targets != IGNORE_INDEX].tolist()
        assert tokenizer.decode(said[:-1]) == answer
        assert said[-1] == tokenizer.eos_id == row.targets[-1]
        assert row.tokens[1:][row.targets[:-1] != IGNORE_INDEX].tolist() == said[:-1]


def test_the_interval_of_a_ratio_equals_a_calculation_by_hand():
    tops, bottoms = np.array([(2.0, 4), (9, 10), (3, 3), (5, 8)]).T
    r = 19 / 25  # the ratio of the totals, not the mean of ratios
    half = 1.96 * math.sqrt(4 / 3 * sum((tops - r * bottoms) ** 2)) / 25
    expected = {"value": r, "low": r - half, "high": r + half}
    scaled = {name: math.exp(end) for name, end in expected.items()}
    assert ratio(tops, bottoms, math.exp) == pytest.approx(scaled)
    assert ratio(tops[:2], bottoms[:2]) == {"value": 11 / 14, "low": None, "high": None}
    assert ratio(np.array([0.0, 0.0, 1.0]), np.ones(3))["low"] == 0
