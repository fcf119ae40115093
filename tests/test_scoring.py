import pytest
import torch
from small_model import opinionated
from torch.nn import functional as F

from evaluation import scoring
from evaluation.scoring import Row, Score, Scorer
from model import IGNORE_INDEX, Transformer

SEQ_LEN, VOCAB_SIZE = 16, 50


@pytest.fixture
def scorer(accelerator) -> Scorer:
    return Scorer(opinionated(VOCAB_SIZE, SEQ_LEN), accelerator, batch_size=4)


def random_rows(n: int) -> list[Row]:
    """Rows of 1 to SEQ_LEN tokens, some targets of each left out; row i belongs to unit i // 3."""
    rng = torch.Generator().manual_seed(3)
    rows = []
    for i in range(n):
        length = int(torch.randint(1, SEQ_LEN + 1, (), generator=rng))
        tokens, targets = torch.randint(0, VOCAB_SIZE, (2, length), generator=rng)
        targets[: length // 3] = IGNORE_INDEX
        rows.append(Row(i // 3, tokens, targets, 10 * i))
    return rows


def alone(model: Transformer, row: Row) -> Score:
    """The score of a row by a loop over its positions, nothing padded, no batch."""
    nll = hits = n = 0
    with torch.no_grad():
        for t, target in enumerate(row.targets.tolist()):
            if target == IGNORE_INDEX:
                continue
            logits = model(row.tokens[None, : t + 1]).logits[0, -1]
            nll -= F.log_softmax(logits.double(), dim=-1)[target].item()
            hits += int(logits.argmax()) == target
            n += 1
    return Score(nll, hits, n, row.n_bytes)


@pytest.mark.parametrize("n", [1, 3, 4, 13])
def test_rows_of_different_lengths_score_as_each_does_alone(scorer, n):
    rows = random_rows(n)
    scored = list(scorer.rows(rows))
    assert [id(row) for row, _ in scored] == [id(row) for row in rows]
    for row, score in scored:
        assert score == pytest.approx(alone(scorer.model, row), rel=1e-5)


def test_rows_of_any_length_are_read_without_cudnn(scorer, monkeypatch):
    """It would make a plan for every length."""
    asked, forward = [], scorer.model.forward

    def model(*asked_for):
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        return forward(*asked_for)

    monkeypatch.setattr(scorer.model, "forward", model)
    for _ in scorer.rows(random_rows(5)):
        assert torch.backends.cuda.cudnn_sdp_enabled()  # as whoever asked has it
    assert asked == [False, False]


def test_the_likeliest_next_tokens_are_all_hits(scorer):
    tokens = torch.arange(SEQ_LEN)
    targets = scorer.model(tokens[None]).logits[0].argmax(dim=-1)
    ((_, right),) = scorer.rows([Row(0, tokens, targets, 1)])
    ((_, wrong),) = scorer.rows([Row(0, tokens, (targets + 1) % VOCAB_SIZE, 1)])
    assert (right.hits, right.n_tokens) == (SEQ_LEN, SEQ_LEN)
    assert (wrong.hits, wrong.n_tokens) == (0, SEQ_LEN)


def test_rows_are_read_a_block_at_a_time_and_come_back_in_order(scorer, monkeypatch):
    monkeypatch.setattr(scoring, "BLOCK_ROWS", 5)
    whole, read = random_rows(12), []

    def reader():
        for row in whole:
            read.append(row)
            yield row

    scored = scorer.rows(reader())
    first, _ = next(scored)
    assert first is whole[0]
    assert len(read) == 5
    assert [row.n_bytes for row, _ in scored] == [10 * i for i in range(1, 12)]


def test_no_block_stays_in_memory_with_the_accelerator(scorer):
    list(scorer.rows(random_rows(9)))
    assert scorer.accelerator._dataloaders == []


def test_units_are_whole_even_where_a_block_ends_inside_one(scorer, monkeypatch):
    rows = random_rows(10)
    expected = [alone(scorer.model, row).nll for row in rows]
    monkeypatch.setattr(scoring, "BLOCK_ROWS", 4)
    units = list(scorer.units(rows))
    assert [(unit, len(scores)) for unit, scores in units] == [(0, 3), (1, 3), (2, 3), (3, 1)]
    got = [score.nll for _, scores in units for score in scores]
    assert got == pytest.approx(expected, rel=1e-5)


def test_bfloat16_runs_under_autocast_and_is_close_but_not_equal(scorer):
    rows = random_rows(12)
    exact = sum(score.nll for _, score in scorer.rows(rows))
    scorer.dtype = torch.bfloat16
    rounded = sum(score.nll for _, score in scorer.rows(rows))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)
