"""Rows get correct scores, and texts and conversations become correct rows."""

import json
import math
import re
from collections import Counter
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
    return Scorer(opinionated(VOCAB_SIZE, SEQ_LEN), accelerator, batch_size=4)


def random_rows(n: int) -> list[Row]:
    """Return rows of 1 to SEQ_LEN tokens; the first third of a row's targets is ignored."""
    rng = torch.Generator().manual_seed(3)
    rows = []
    for i in range(n):
        length = int(torch.randint(1, SEQ_LEN + 1, (), generator=rng))
        tokens, targets = torch.randint(0, VOCAB_SIZE, (2, length), generator=rng)
        targets[: length // 3] = IGNORE_INDEX
        rows.append(Row(i // 3, tokens, targets, 10 * i))  # three rows per unit
    return rows


def score_alone(model: Transformer, row: Row) -> list[float]:
    """Compute the four sums of a row's score, without padding or batches."""
    with torch.no_grad():
        logits = model(row.tokens[None]).logits[0].double()
    counts = row.targets != IGNORE_INDEX
    logits, targets = logits[counts], row.targets[counts]
    nll, hits = F.cross_entropy(logits, targets, reduction="sum"), logits.argmax(-1) == targets
    return [nll.item(), hits.sum().item(), len(targets), row.n_bytes]


@pytest.mark.parametrize("n", [1, 13])
def test_scores_do_not_depend_on_blocks_and_are_grouped_by_unit(scorer, monkeypatch, n):
    """Blocks of 5 rows end inside a unit of 3."""
    monkeypatch.setattr(scoring, "BLOCK_ROWS", 5)
    rows, read = random_rows(n), []
    units = scorer.units(read.append(row) or row for row in rows)
    first = next(units)
    assert len(read) == min(n, 5)
    scored = [first, *units]
    assert [(unit, len(scores)) for unit, scores in scored] == [
        (unit, min(3, n - 3 * unit)) for unit in range(-(-n // 3))
    ]
    scores = [score for _, scores in scored for score in scores]
    for row, score in zip(rows, scores, strict=True):
        assert score.tolist() == pytest.approx(score_alone(scorer.model, row), rel=1e-5)
    assert scorer.accelerator._dataloaders == []  # no block stays in memory


def test_bfloat16_scores_are_close_but_not_equal_to_fp32_scores(scorer):
    exact, rounded = (
        sum(scores[:, 0].sum() for _, scores in replace(scorer, dtype=dtype).units(random_rows(12)))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert exact != rounded == pytest.approx(exact, rel=0.02)


def naive_nll(model, ids: list[int], stride: int) -> float:
    """Score token by token. The first window that predicts ids[t] gives the context of ids[t]."""
    total = 0.0
    for t in range(1, len(ids)):
        start = stride * max(0, math.ceil((t - SEQ_LEN) / stride))
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:t]])).logits[0, -1].double()
        total -= F.log_softmax(logits, dim=-1)[ids[t]].item()
    return total


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_document_scores_equal_those_of_scoring_one_token_at_a_time(scorer, tokenizer, stride):
    texts = list(filter(None, TEXTS))
    ids = [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    assert len(ids[0]) > 2 * SEQ_LEN
    records = [Record("a.txt", "a.txt", text.encode()) for text in TEXTS]
    units = list(scorer.units(document_rows(records, tokenizer, SEQ_LEN, stride, {})))
    found, hits = summary(units), sum(scores[:, 1].sum() for _, scores in units)
    nll = sum(naive_nll(scorer.model, document, stride) for document in ids)
    n_tokens = sum(len(document) - 1 for document in ids)
    n_bytes = sum(len(text.encode()) for text in texts)
    assert (found["units"], found["tokens"], found["bytes"]) == (len(texts), n_tokens, n_bytes)
    metrics = {name: metric["value"] for name, metric in found["metrics"].items()}
    assert metrics["accuracy"] == pytest.approx(hits / n_tokens)
    assert metrics["loss"] == pytest.approx(nll / n_tokens, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(nll / n_tokens), rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(nll / math.log(2) / n_bytes, rel=1e-6)


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
