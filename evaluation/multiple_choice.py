"""Multiple-choice questions, answered with the choice that the model finds likeliest.

One JSON object per line of a .jsonl file:

    {"question": "The opposite of hot is", "choices": ["cold", "warm"], "answer": 0}

The answer is the number of the right choice, counted from 0, or its letter, counted from "A".
"""

from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import NamedTuple

import torch

from data.chat_template import encode_conversation
from data.conversations import ASSISTANT, USER, Turn
from data.corpus import Record, load_json, refuse_half_characters
from data.errors import DataError
from data.tokenizer import Tokenizer
from evaluation.intervals import Estimate, wilson
from evaluation.scoring import Row, Scorer
from model import IGNORE_INDEX


class Question(NamedTuple):
    place: str  # file and line, for messages; no two questions share it
    text: str
    choices: tuple[str, ...]
    answer: int  # index of the right choice


def parse_question(record: Record) -> Question:
    """Return the question in one line. Raises DataError: the line holds no such question; names
    file, line and what is wrong."""
    place, fields = record.place, load_json(record)
    if not isinstance(fields, dict) or not isinstance(fields.get("question"), str):
        raise DataError(f'{place}: no "question" with a string in it')
    question, choices, answer = (fields.get(key) for key in ("question", "choices", "answer"))
    is_list = isinstance(choices, list) and len(choices) >= 2
    if not is_list or not all(isinstance(choice, str) and choice for choice in choices):
        raise DataError(f'{place}: "choices" must be a list of at least two strings, none empty')
    refuse_half_characters(place, "".join([question, *choices]))
    if isinstance(answer, str) and len(answer) == 1:
        answer = ord(answer) - ord("A")
    if type(answer) is not int or not 0 <= answer < len(choices):
        last = len(choices) - 1
        raise DataError(
            f'{place}: "answer" is {fields.get("answer")!r}; it must be 0 to {last} or "A" to '
            f'"{chr(ord("A") + last)}"'
        )
    return Question(place, question, tuple(choices), answer)


def encode_choices(
    question: Question, tokenizer: Tokenizer, delimiter: str
) -> list[tuple[list[int], int]]:
    """Return for every choice the ids of `<s> question delimiter choice`, and how many of them are
    context.

    The end of a question and the start of a choice may share a token. Therefore everything is
    encoded whole, and context is what the question alone and all of its choices have in common:
    behind it every choice is scored from the same place.

    Raises DataError: a choice that adds no token; names file and line.
    """
    texts = [question.text + delimiter + choice for choice in question.choices]
    encoded = tokenizer.encode_batch([question.text, *texts])
    equal = takewhile(lambda column: len(set(column)) == 1, zip(*encoded, strict=False))
    n_equal = len(list(equal))
    for i, ids in enumerate(encoded[1:]):
        if len(ids) == n_equal:
            raise DataError(f"{question.place}: choice {i} adds no token to the question")
    return [([tokenizer.bos_id, *ids], 1 + n_equal) for ids in encoded[1:]]


def encode_turns(question: Question, tokenizer: Tokenizer) -> list[tuple[list[int], int]]:
    """Return for every choice the ids of a conversation, from the user's question to the end piece
    of the choice as its answer, and how many of them are context."""
    encoded = []
    for choice in question.choices:
        turns = [Turn(USER, question.text), Turn(ASSISTANT, choice)]
        ids, is_answer = encode_conversation(tokenizer, turns)
        n_context = is_answer.index(True)
        encoded.append((ids[: n_context + sum(is_answer)], n_context))
    return encoded


def question_rows(
    records: Iterable[Record], tokenizer: Tokenizer, seq_len: int, delimiter: str | None
) -> Iterator[Row]:
    """Yield one row per choice; its unit is (Question, whether its beginning was left out because
    the question with a choice is longer than the context).

    Args:
        delimiter: between question and choice; None makes them turns of a conversation.

    Raises DataError: a line that is no question, or a choice that alone is longer than the context.
    """
    for record in records:
        question = parse_question(record)
        if delimiter is None:
            encoded = encode_turns(question, tokenizer)
        else:
            encoded = encode_choices(question, tokenizer, delimiter)
        unit = question, any(len(ids) > seq_len + 1 for ids, _ in encoded)
        for choice, (ids, n_context) in zip(question.choices, encoded, strict=True):
            n_scored = len(ids) - n_context
            if n_scored > seq_len:
                raise DataError(
                    f"{question.place}: a choice of {n_scored} tokens does not fit into the "
                    f"context of {seq_len}"
                )
            ids = ids[-(seq_len + 1) :]
            targets = [IGNORE_INDEX] * (len(ids) - 1 - n_scored) + ids[len(ids) - n_scored :]
            yield Row(unit, torch.tensor(ids[:-1]), torch.tensor(targets), len(choice.encode()))


def answer(scorer: Scorer, rows: Iterable[Row]) -> dict:
    """Have the model answer all questions; of equally likely choices the first is taken.

    Length-normalised means per byte of UTF-8 of the choice without the delimiter, so that it does
    not depend on the tokenizer; lm-evaluation-harness divides by characters, for ASCII the same.

    Returns: how many questions there are, how many of them were truncated, and the shares that were
    right: "acc" by the log-likelihood of the whole choice, "acc_norm" by that per byte, "chance" by
    guessing, on average. Without a question there are no shares.
    """
    n = n_truncated = right = right_per_byte = 0
    by_chance = 0.0
    for (question, is_truncated), scores in scorer.units(rows):
        whole = [score.nll for score in scores]
        per_byte = [score.nll / score.n_bytes for score in scores]
        n += 1
        n_truncated += is_truncated
        right += whole.index(min(whole)) == question.answer
        right_per_byte += per_byte.index(min(per_byte)) == question.answer
        by_chance += 1 / len(scores)
    counts = {"units": n, "unit": "questions", "truncated": n_truncated}
    if not n:
        return counts
    metrics = {
        "acc": wilson(right, n),
        "acc_norm": wilson(right_per_byte, n),
        "chance": Estimate(by_chance / n, by_chance / n, by_chance / n),
    }
    return counts | {"metrics": metrics}
