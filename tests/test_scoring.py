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


@pytest.mark.parametrize("n", [1, 13])
def test_rows_score_as_each_does_alone_in_units_and_blocks(scorer, monkeypatch, n):
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
        assert score == pytest.approx(alone(scorer.model, row), rel=1e-5)
    assert scorer.accelerator._dataloaders == []  # no block stays in memory


def test_rows_of_any_length_are_read_without_cudnn(scorer, monkeypatch):
    """It would make a plan for every length."""
    asked, forward = [], scorer.model.forward

    def model(*asked_for):
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        return forward(*asked_for)

    monkeypatch.setattr(scorer.model, "forward", model)
    list(scorer.rows(random_rows(5)))
    assert asked == [False, False]


def test_the_likeliest_next_tokens_are_all_hits(scorer):
    tokens = torch.arange(SEQ_LEN)
    targets = scorer.model(tokens[None]).logits[0].argmax(dim=-1)
    ((_, right),) = scorer.rows([Row(0, tokens, targets, 1)])
    ((_, wrong),) = scorer.rows([Row(0, tokens, (targets + 1) % VOCAB_SIZE, 1)])
    assert (right.hits, right.n_tokens) == (SEQ_LEN, SEQ_LEN)
    assert (wrong.hits, wrong.n_tokens) == (0, SEQ_LEN)


def test_bfloat16_runs_under_autocast_and_is_close_but_not_equal(scorer):
    rows = random_rows(12)
    exact = sum(score.nll for _, score in scorer.rows(rows))
    scorer.dtype = torch.bfloat16
    rounded = sum(score.nll for _, score in scorer.rows(rows))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)
