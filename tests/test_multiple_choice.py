import json

import pytest
import torch
from conftest import VOCAB_SIZE, error_of
from small_model import opinionated
from torch.nn import functional as F

from lm.data.corpus import Record
from lm.evaluation.multiple_choice import answers, encode_choices, question_rows
from lm.evaluation.scoring import Scorer
from model import IGNORE_INDEX

SEQ_LEN = 32
GOOD = {"question": "2 + 2 =", "choices": ["3", "4", "五"], "answer": 1}
QUESTIONS = [
    {"question": "sum 4: 1 + 4 =", "choices": ["5;", "sum", "第", "1 + 4 = 5; 2"], "answer": 0},
    {"question": "第", "choices": ["4", "句", "句\n"], "answer": 1},
    {"question": "", "choices": ["sum 1", "+"], "answer": "A"},
    {"question": "1 + 1 = 2; " * 8, "choices": ["2 + 1", "sum sum"], "answer": "A"},
    {"question": "sum", "choices": ["=", "+", " "], "answer": "C"},
]


def records(questions: list) -> list[Record]:
    lines = enumerate(map(json.dumps, questions), 1)
    return [Record("q.jsonl", f"q.jsonl, line {i}", line.encode()) for i, line in lines]


@pytest.fixture
def scorer(accelerator) -> Scorer:
    return Scorer(opinionated(VOCAB_SIZE, SEQ_LEN), accelerator, batch_size=4)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (["a list"], "not JSON of one object (this is a list)"),
        (GOOD | {"choices": ["3"], "answer": 0}, "not a question"),
        (GOOD | {"choices": ["3", ""]}, "not a question"),
        (GOOD | {"answer": 3}, "not a question"),
        (GOOD | {"choices": ["3", "\ud83d"]}, "not a question"),
        (GOOD | {"choices": ["1", "2 + 7 = 9; " * 10]}, f"tokens, not 1-{SEQ_LEN}"),
    ],
)
def test_an_invalid_question_is_an_error_with_its_line_and_the_reason(tokenizer, fields, says):
    line = error_of(list, question_rows(records([GOOD, fields]), tokenizer, SEQ_LEN, " "))
    assert line.startswith("q.jsonl, line 2: ")
    assert says in line


class OneIdPerCharacter:
    """A tokenizer with one id per character, except that "ab" is one id."""

    bos_id = 0

    def encode_batch(self, texts):
        return [[ord(c) for c in text.replace("ab", "Ω")] for text in texts]


@pytest.mark.parametrize(
    ("question", "choices", "delimiter", "scored"),
    [
        ("xy", ["cd", "e"], "", ["cd", "e"]),
        ("xy", ["cd", "e"], " ", [" cd", " e"]),
        ("xa", ["bcd", "cd"], "", ["Ωcd", "acd"]),  # "ab" spans question and choice
        ("xy", ["the c", "the d"], "", ["the c", "the d"]),
    ],
)
def test_the_context_is_the_common_beginning_of_all_choices(question, choices, delimiter, scored):
    encoded = encode_choices(OneIdPerCharacter(), question, choices, delimiter)
    assert ["".join(map(chr, ids[n_context:])) for ids, n_context in encoded] == scored


def test_with_the_chat_template_the_answer_and_its_end_token_are_scored(tokenizer):
    rows = question_rows(records(QUESTIONS[:1]), tokenizer, SEQ_LEN, delimiter=None)
    for row, choice in zip(rows, QUESTIONS[0]["choices"], strict=True):
        said = row.targets[row.targets != IGNORE_INDEX].tolist()
        assert said == [*tokenizer.encode(choice), tokenizer.eos_id]
        assert row.tokens[-len(said) + 1 :].tolist() == said[:-1]


def naive(model, tokenizer, fields: dict) -> tuple[int, int]:
    """Score token by token. Return the index of the likeliest choice in total, and per byte."""
    context = [tokenizer.bos_id, *tokenizer.encode(fields["question"])]
    whole, per_byte = [], []
    for choice in fields["choices"]:
        ids = [tokenizer.bos_id, *tokenizer.encode(f"{fields['question']} {choice}")]
        assert ids[: len(context)] == context
        log_likelihood = 0.0
        for t in range(len(context), len(ids)):
            seen = torch.tensor([ids[max(0, len(ids) - 1 - SEQ_LEN) : t]])
            with torch.no_grad():
                logits = model(seen).logits[0, -1]
            log_likelihood += F.log_softmax(logits, dim=-1)[ids[t]].item()
        whole.append(log_likelihood)
        per_byte.append(log_likelihood / len(choice.encode()))
    return whole.index(max(whole)), per_byte.index(max(per_byte))


def answered(scorer, tokenizer, questions: list[dict]) -> dict:
    rows = question_rows(records(questions), tokenizer, SEQ_LEN, " ")
    found = answers(list(scorer.units(rows)))
    return found | {name: metric["value"] for name, metric in found["metrics"].items()}


def test_the_accuracy_equals_that_of_naive_scoring(scorer, tokenizer):
    """The answers are first the likeliest choices according to `naive`, then other choices."""
    likeliest = [naive(scorer.model, tokenizer, question) for question in QUESTIONS]
    assert len({best for best, _ in likeliest}) > 1
    assert any(whole != per_byte for whole, per_byte in likeliest)
    for which, name in enumerate(("acc", "acc_norm")):
        best = [q | {"answer": picks[which]} for q, picks in zip(QUESTIONS, likeliest, strict=True)]
        other = [q | {"answer": (q["answer"] + 1) % len(q["choices"])} for q in best]
        assert answered(scorer, tokenizer, best)[name] == 1
        assert answered(scorer, tokenizer, other)[name] == 0


def test_a_long_question_keeps_its_end_and_a_question_that_just_fits_is_whole(tokenizer):
    text = QUESTIONS[0]["question"]
    fields = {"question": text, "choices": ["5;", "6;"], "answer": 0}
    whole = [tokenizer.bos_id, *tokenizer.encode(f"{text} 5;")]
    for seq_len, is_truncated in ((len(whole) - 1, False), (len(whole) - 2, True)):
        row, _ = question_rows(records([fields]), tokenizer, seq_len, " ")
        assert row.unit == ("q.jsonl, line 1", 0, is_truncated)
        assert row.tokens.tolist() == whole[-seq_len - 1 : -1]
        assert row.targets[-1] == whole[-1]
