"""Multiple-choice questions, answered with the choice that the model finds likeliest."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import takewhile

import numpy as np
import torch

from data.chat_template import encode_conversation
from data.conversations import ASSISTANT, USER, Turn
from data.corpus import Record, load_json
from data.errors import DataError
from data.tokenizer import Tokenizer
from evaluation.scoring import Row, ratio
from model import IGNORE_INDEX

# A line of a .jsonl file
FORM = '{"question": text, "choices": [two or more texts], "answer": number from 0, or "A", "B" …}'


def parse_question(record: Record) -> tuple[str, list[str], int]:
    """Return question, choices and index of the right one. Raises DataError: there is none."""
    fields = load_json(record)
    fields = fields if isinstance(fields, dict) else {}
    text, choices, right = (fields.get(key) for key in ("question", "choices", "answer"))
    if isinstance(right, str) and len(right) == 1:
        right = ord(right) - ord("A")
    texts = [text, *choices] if isinstance(choices, list) else []
    is_valid = len(texts) > 2 and all(isinstance(each, str) for each in texts) and all(choices)
    if not is_valid or type(right) is not int or not 0 <= right < len(choices):
        raise DataError(f"{record.place}: no question, which is {FORM}")
    return text, choices, right


def encode_choices(
    tokenizer: Tokenizer, text: str, choices: list[str], delimiter: str | None
) -> list[tuple[list[int], int]]:
    """Return for every choice the ids of `<s> question delimiter choice`, or without delimiter of
    two turns of a chat, and how many of the ids are context.

    The end of a question and the start of a choice may share a token: context is what the question
    alone and all of its choices have in common.
    """
    if delimiter is None:
        chats = [[Turn(USER, text), Turn(ASSISTANT, choice)] for choice in choices]
        encoded = [encode_conversation(tokenizer, chat) for chat in chats]
        starts = [is_answer.index(True) for _, is_answer in encoded]
        return [(ids[: n + sum(said)], n) for (ids, said), n in zip(encoded, starts, strict=True)]
    encoded = tokenizer.encode_batch([text, *(text + delimiter + choice for choice in choices)])
    equal = takewhile(lambda column: len(set(column)) == 1, zip(*encoded, strict=False))
    n_context = 1 + len(list(equal))
    return [([tokenizer.bos_id, *ids], n_context) for ids in encoded[1:]]


def question_rows(
    records: Iterable[Record], tokenizer: Tokenizer, seq_len: int, delimiter: str | None
) -> Iterator[Row]:
    """Yield one row per choice. Its unit is (place, index of the right choice, whether the context
    is too short for the question's beginning).

    Raises DataError: no question, or a choice without a token or longer than the context.
    """
    for record in records:
        text, choices, right = parse_question(record)
        encoded = encode_choices(tokenizer, text, choices, delimiter)
        unit = record.place, right, any(len(ids) > seq_len + 1 for ids, _ in encoded)
        for choice, (ids, n_context) in zip(choices, encoded, strict=True):
            n_scored = len(ids) - n_context
            if not 0 < n_scored <= seq_len:
                raise DataError(f"{record.place}: a choice has no token, or more than {seq_len}")
            ids = ids[-(seq_len + 1) :]
            targets = [IGNORE_INDEX] * (len(ids) - 1 - n_scored) + ids[len(ids) - n_scored :]
            yield Row(unit, torch.tensor(ids[:-1]), torch.tensor(targets), len(choice.encode()))


def answers(units: list[tuple[tuple, np.ndarray]]) -> dict:
    """Return counts, and the shares that were answered rightly: "acc" by the log-likelihood of the
    whole choice, "acc_norm" by that per byte of UTF-8, "chance" by guessing. Of equally likely
    choices the first is taken.
    """
    rows = []
    for (_, right, is_truncated), scores in units:
        nll, n_bytes = scores[:, 0], scores[:, 3]
        by_choice, by_byte = nll.argmin() == right, (nll / n_bytes).argmin() == right
        rows.append([by_choice, by_byte, 1 / len(scores), is_truncated])
    acc, acc_norm, chance, truncated = np.array(rows, float).T
    metrics = {
        "acc": ratio(acc, np.ones_like(acc), partial(min, 1.0)),
        "acc_norm": ratio(acc_norm, np.ones_like(acc), partial(min, 1.0)),
        "chance": dict.fromkeys(("value", "low", "high"), chance.mean()),
    }
    n_truncated = int(sum(truncated))
    return {"units": len(units), "unit": "questions", "truncated": n_truncated, "metrics": metrics}
