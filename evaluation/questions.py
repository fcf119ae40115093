"""Multiple-choice questions, one JSON object per line of a .jsonl or .jsonl.gz file:

    {"question": "The opposite of hot is", "choices": ["cold", "warm"], "answer": 0}

The answer is the number of the right choice, counted from 0, or its letter, counted from "A".
"""

from typing import NamedTuple

from data.corpus import Record, load_json, refuse_half_characters
from data.errors import DataError


class Question(NamedTuple):
    place: str  # file and line, for messages; no two questions share it
    text: str
    choices: tuple[str, ...]
    answer: int  # index of the right choice


def parse_question(record: Record) -> Question:
    """The question in one line. Raises DataError: the line holds no such question; names file, line
    and what is wrong."""
    fields = load_json(record)
    if not isinstance(fields, dict) or not isinstance(fields.get("question"), str):
        raise DataError(f'{record.place}: no "question" with a string in it')
    choices = fields.get("choices")
    if not isinstance(choices, list) or len(choices) < 2:
        raise DataError(f'{record.place}: "choices" must be a list of at least two strings')
    for i, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise DataError(f"{record.place}: choice {i} is {choice!r}, not a text to score")
        refuse_half_characters(record.place, choice)
    refuse_half_characters(record.place, fields["question"])
    answer = fields.get("answer")
    if isinstance(answer, str) and len(answer) == 1 and answer.isascii():
        answer = ord(answer) - ord("A")
    if type(answer) is not int or not 0 <= answer < len(choices):
        letters = f'"A" to "{chr(ord("A") + len(choices) - 1)}"'
        raise DataError(
            f'{record.place}: "answer" is {fields.get("answer")!r}; it must be 0 to '
            f"{len(choices) - 1} or {letters}"
        )
    return Question(record.place, fields["question"], tuple(choices), answer)
