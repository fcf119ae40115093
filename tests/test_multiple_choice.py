import json

import pytest
import torch
from conftest import VOCAB_SIZE
from small_model import opinionated
from torch.nn import functional as F

from data.corpus import Record
from data.errors import DataError
from data.tokenizer import TOKENIZER_FILE, Tokenizer
from evaluation.multiple_choice import (
    ChoiceCounts,
    answer,
    encode_choices,
    question_rows,
)
from evaluation.questions import Question, parse_question
from evaluation.scoring import Scorer

SEQ_LEN = 32
QUESTIONS = [
    {"question": "sum 4: 1 + 4 =", "choices": ["5;", "sum", "第", "1 + 4 = 5; 2"], "answer": 0},
    {"question": "第", "choices": ["4", "句", "句\n"], "answer": 1},
    {"question": "", "choices": ["sum 1", "+"], "answer": "A"},
    {"question": "1 + 1 = 2; " * 8, "choices": ["2 + 1", "sum sum"], "answer": "A"},
    {"question": "sum", "choices": ["=", "+", " "], "answer": "C"},
]


def records(questions: list[dict]) -> list[Record]:
    return [Record("q.jsonl", i, json.dumps(q).encode()) for i, q in enumerate(questions, 1)]


@pytest.fixture
def tokenizer(packed) -> Tokenizer:
    return Tokenizer(packed / TOKENIZER_FILE)


@pytest.fixture
def scorer(accelerator) -> Scorer:
    return Scorer(opinionated(VOCAB_SIZE, SEQ_LEN), accelerator, batch_size=4)


class OneIdPerCharacter:
    """A tokenizer that joins "ab" to one id, wherever it stands."""

    bos_id = 0

    def encode_batch(self, texts):
        return [[ord(c) for c in text.replace("ab", "Ω")] for text in texts]


def asked(question: str, *choices: str, delimiter: str = ""):
    fields = {"question": question, "choices": list(choices), "answer": 0}
    (record,) = records([fields])
    ids, n_context = encode_choices(parse_question(record), OneIdPerCharacter(), delimiter)
    return ["".join(map(chr, choice[n_context:])) for choice in ids]


def test_only_the_choice_is_scored_where_tokens_end_with_the_question():
    assert asked("xy", "cd", "e") == ["cd", "e"]


def test_the_delimiter_is_scored_with_the_choice():
    assert asked("xy", "cd", "e", delimiter=" ") == [" cd", " e"]


def test_a_token_across_the_boundary_is_scored_and_all_choices_begin_at_the_same_place():
    assert asked("xa", "bcd", "cd") == ["Ωcd", "acd"]


def test_what_all_choices_begin_with_is_scored_and_no_context():
    assert asked("xy", "the c", "the d") == ["the c", "the d"]


def test_a_choice_that_adds_no_token_is_refused():
    class Strips(OneIdPerCharacter):
        def encode_batch(self, texts):
            return super().encode_batch([text.strip() for text in texts])

    with pytest.raises(DataError, match=r"q\.jsonl, line 4: choice 1 adds no token"):
        encode_choices(Question("q.jsonl, line 4", "x", ("y", " "), 0), Strips(), " ")


def naive(model, tokenizer, fields: dict, delimiter: str) -> tuple[int, int]:
    """(likeliest choice, likeliest per byte), one token at a time. Here no token crosses."""
    context = [tokenizer.bos_id, *tokenizer.encode(fields["question"])]
    whole, per_byte = [], []
    for choice in fields["choices"]:
        ids = tokenizer.encode(fields["question"] + delimiter + choice)
        assert ids[: len(context) - 1] == context[1:]
        ids, log_likelihood = [tokenizer.bos_id, *ids], 0.0
        for t in range(len(context), len(ids)):
            seen = torch.tensor([ids[max(0, len(ids) - 1 - SEQ_LEN) : t]])
            with torch.no_grad():
                logits = model(seen).logits[0, -1]
            log_likelihood += F.log_softmax(logits, dim=-1)[ids[t]].item()
        whole.append(log_likelihood)
        per_byte.append(log_likelihood / len(choice.encode()))
    return whole.index(max(whole)), per_byte.index(max(per_byte))


def count(scorer, tokenizer, questions: list[dict], delimiter: str = " ") -> ChoiceCounts:
    counts = ChoiceCounts()
    rows = question_rows(records(questions), tokenizer, SEQ_LEN, delimiter, counts)
    answer(scorer, rows, counts)
    return counts


def test_questions_are_answered_as_by_naive_scoring(scorer, tokenizer):
    """The choice that the naive loop finds likeliest is made the right one, then a wrong one."""
    likeliest = [naive(scorer.model, tokenizer, question, " ") for question in QUESTIONS]
    assert len({best for best, _ in likeliest}) > 1
    assert any(whole != per_byte for whole, per_byte in likeliest)
    for which, name in enumerate(("right", "right_normalised")):
        best = [q | {"answer": picks[which]} for q, picks in zip(QUESTIONS, likeliest, strict=True)]
        other = [q | {"answer": (q["answer"] + 1) % len(q["choices"])} for q in best]
        assert getattr(count(scorer, tokenizer, best), name) == len(QUESTIONS)
        assert getattr(count(scorer, tokenizer, other), name) == 0


def test_truncated_questions_and_chance_are_counted(scorer, tokenizer):
    counts = count(scorer, tokenizer, QUESTIONS)
    assert len(tokenizer.encode(QUESTIONS[3]["question"])) > SEQ_LEN
    assert (counts.n, counts.truncated) == (5, 1)
    assert counts.metrics()["chance"].value == pytest.approx(
        (1 / 4 + 1 / 3 + 1 / 2 * 2 + 1 / 3) / 5
    )


def test_a_long_question_keeps_its_end(tokenizer):
    counts = ChoiceCounts()
    rows = list(question_rows(records([QUESTIONS[3]]), tokenizer, SEQ_LEN, " ", counts))
    whole = [tokenizer.bos_id, *tokenizer.encode(QUESTIONS[3]["question"] + " 2 + 1")]
    assert rows[0].tokens.tolist() == whole[-SEQ_LEN - 1 : -1]
    assert rows[0].targets[-1] == whole[-1]


def test_a_question_that_just_fits_is_not_truncated(tokenizer):
    (text,) = [q["question"] for q in QUESTIONS[:1]]
    n = len(tokenizer.encode(f"{text} 5;"))  # with <s> that is one id more than is read
    for seq_len, truncated in ((n, 0), (n - 1, 1)):
        counts = ChoiceCounts()
        fields = {"question": text, "choices": ["5;", "6;"], "answer": 0}
        list(question_rows(records([fields]), tokenizer, seq_len, " ", counts))
        assert counts.truncated == truncated


def test_equal_choices_count_as_the_first(scorer, tokenizer):
    twins = {"question": "sum", "choices": ["1", "1"], "answer": 0}
    counts = count(scorer, tokenizer, [twins, twins | {"answer": 1}])
    assert (counts.right, counts.right_normalised) == (1, 1)


def test_the_same_question_twice_is_two_questions(scorer, tokenizer):
    assert count(scorer, tokenizer, [QUESTIONS[0]] * 2).n == 2


def test_a_choice_longer_than_the_context_is_refused_by_file_and_line(scorer, tokenizer):
    endless = {"question": "sum", "choices": ["1", "2 + 7 = 9; " * 10], "answer": 0}
    with pytest.raises(DataError, match=r"q\.jsonl, line 2: a choice of \d+ tokens does not fit"):
        count(scorer, tokenizer, [QUESTIONS[0], endless])
