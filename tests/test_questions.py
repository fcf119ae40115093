import json

import pytest

from data.corpus import Record
from data.errors import DataError
from evaluation.questions import parse_question

GOOD = {"question": "2 + 2 =", "choices": ["3", "4", "五"], "answer": 1}


def record(fields) -> Record:
    return Record("q.jsonl", 7, json.dumps(fields).encode())


@pytest.mark.parametrize(("answer", "index"), [(0, 0), (2, 2), ("A", 0), ("C", 2)])
def test_an_answer_is_a_number_or_a_letter(answer, index):
    question = parse_question(record(GOOD | {"answer": answer}))
    assert question == ("q.jsonl, line 7", "2 + 2 =", ("3", "4", "五"), index)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (["a list"], 'no "question"'),
        ({"text": "a document"}, 'no "question"'),
        (GOOD | {"question": None}, 'no "question"'),
        (GOOD | {"choices": "34"}, '"choices" must be a list'),
        (GOOD | {"choices": ["4"]}, "at least two"),
        (GOOD | {"choices": ["3", ""]}, "choice 1 is ''"),
        (GOOD | {"choices": ["3", 4]}, "choice 1 is 4"),
        (GOOD | {"answer": 3}, '"answer" is 3; it must be 0 to 2 or "A" to "C"'),
        (GOOD | {"answer": -1}, '"answer" is -1'),
        (GOOD | {"answer": True}, '"answer" is True'),
        (GOOD | {"answer": "D"}, "\"answer\" is 'D'"),
        (GOOD | {"answer": "4"}, "\"answer\" is '4'"),
        ({"question": "2", "choices": ["3", "4"]}, '"answer" is None'),
        (GOOD | {"choices": ["3", "\ud83d"]}, "half a surrogate pair"),
        (GOOD | {"question": "\ud83d"}, "half a surrogate pair"),
    ],
)
def test_a_line_that_is_no_question_is_named_with_what_is_wrong(fields, says):
    with pytest.raises(DataError) as error:
        parse_question(record(fields))
    assert str(error.value).startswith("q.jsonl, line 7: ")
    assert says in str(error.value)


def test_a_line_that_is_not_json_is_named():
    with pytest.raises(DataError, match=r"q\.jsonl, line 3: not JSON"):
        parse_question(Record("q.jsonl", 3, b"{"))
