import json

import numpy as np
import pytest
from conftest import error_of

from lm.data.corpus import Record
from lm.evaluation.multiple_choice import answers, encode_choices, question_rows
from model import IGNORE_INDEX

SEQ_LEN = 32
GOOD = {"question": "2 + 2 =", "choices": ["3", "4", "五"], "answer": 1}
TEXT, CHOICES = "sum 4: 1 + 4 =", ["5;", "sum", "第", "1 + 4 = 5; 2"]


def records(questions: list) -> list[Record]:
    lines = enumerate(map(json.dumps, questions), 1)
    return [Record("q.jsonl", f"q.jsonl, line {i}", line.encode()) for i, line in lines]


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
    fields = {"question": TEXT, "choices": CHOICES, "answer": "A"}
    rows = question_rows(records([fields]), tokenizer, SEQ_LEN, delimiter=None)
    for row, choice in zip(rows, CHOICES, strict=True):
        assert row.n_bytes == len(choice.encode())
        said = row.targets[row.targets != IGNORE_INDEX].tolist()
        assert said == [*tokenizer.encode(choice), tokenizer.eos_id]
        assert row.tokens[-len(said) + 1 :].tolist() == said[:-1]


def test_the_answer_is_the_likeliest_choice_in_total_or_per_byte():
    """Columns of scores: negative log-likelihood, hits, targets, bytes."""
    first = np.array([(2.0, 0, 1, 1), (3.0, 0, 1, 3)])  # 0 in total, 1 per byte
    second = np.array([(5.0, 0, 1, 1), (4.0, 0, 1, 1), (4.0, 0, 1, 1)])  # 1 both times
    units = [(("line 1", 0, False), first), (("line 2", 1, True), second)]
    units.append((("line 3", 2, True), second))
    found = answers(units)
    assert {name: metric["value"] for name, metric in found["metrics"].items()} == pytest.approx(
        {"acc": 2 / 3, "acc_norm": 1 / 3, "chance": (1 / 2 + 1 / 3 + 1 / 3) / 3}
    )
    assert (found["units"], found["truncated"]) == (3, 2)


def test_a_long_question_keeps_its_end_and_a_question_that_just_fits_is_whole(tokenizer):
    fields = {"question": TEXT, "choices": ["5;", "6;"], "answer": "B"}
    whole = [tokenizer.bos_id, *tokenizer.encode(f"{TEXT} 5;")]
    for seq_len, is_truncated in ((len(whole) - 1, False), (len(whole) - 2, True)):
        row, _ = question_rows(records([fields]), tokenizer, seq_len, " ")
        assert row.unit == ("q.jsonl, line 1", 1, is_truncated)
        assert row.tokens.tolist() == whole[-seq_len - 1 : -1]
        assert row.targets[-1] == whole[-1]
