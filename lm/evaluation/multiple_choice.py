"""Score multiple-choice questions: the model answers with the most likely choice."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import takewhile

import numpy as np
import torch

from lm.common.errors import UsageError
from lm.common.parser import is_text
from lm.data.conversations import ASSISTANT, USER, Turn, encode_conversation
from lm.data.corpus import Record, load_json
from lm.data.dataset import next_tokens
from lm.data.tokenizer import Tokenizer
from lm.evaluation.scoring import Row, ratio

KEYS = ("question", "choices", "answer")
FORM = '{"question": text, "choices": [two or more texts], "answer": number from 0, or "A", "B" …}'


def parse_question(record: Record) -> tuple[str, list[str], int]:
    """Return question, choices, index of the answer. Raises UsageError for another form."""
    fields = load_json(record)
    text, choices, right = map(fields.get, KEYS)
    if isinstance(right, str) and len(right) == 1:
        right = ord(right) - ord("A")  # "B" is 1
    texts = [text, *choices] if isinstance(choices, list) else []
    is_valid = len(texts) > 2 and all(map(is_text, texts)) and all(choices)
    if not is_valid or type(right) is not int or not 0 <= right < len(choices):
        raise UsageError(f"{record.place}: not a question of the form {FORM}")
    return text, choices, right


def encode_choices(
    tokenizer: Tokenizer, text: str, choices: list[str], delimiter: str | None
) -> list[tuple[list[int], int]]:
    """Return (ids, number of context ids) for each choice.

    The ids are `<s> question delimiter choice`. If `delimiter` is None, they are a chat of two
    turns. A token may contain the end of the question and the start of a choice. Without a chat the
    context is therefore the longest beginning that the question's ids and all choices' ids share.
    """
    if delimiter is None:
        chats = [[Turn(USER, text), Turn(ASSISTANT, choice)] for choice in choices]
        encoded = [encode_conversation(tokenizer, turns) for turns in chats]
        return [(ids[:end], begin) for ids, [(begin, end)] in encoded]
    encoded = tokenizer.encode_batch([text, *(text + delimiter + choice for choice in choices)])
    equal = takewhile(lambda column: len(set(column)) == 1, zip(*encoded, strict=False))
    n_context = 1 + len(list(equal))  # <s> counts too
    return [([tokenizer.bos_id, *ids], n_context) for ids in encoded[1:]]


def question_rows(
    records: Iterable[Record], tokenizer: Tokenizer, seq_len: int, delimiter: str | None
) -> Iterator[Row]:
    """Yield one row per choice. All rows of a question have the same `Row.unit`.

    This unit is (place, index of the right choice, True if a row is cut to fit the context).
    Raises UsageError if a line is not a question, or a choice has no token or exceeds the context.
    """
    for record in records:
        text, choices, right = parse_question(record)
        encoded = encode_choices(tokenizer, text, choices, delimiter)
        unit = record.place, right, any(len(ids) > seq_len + 1 for ids, _ in encoded)
        for choice, (ids, n_context) in zip(choices, encoded, strict=True):
            n_scored = len(ids) - n_context
            if not 0 < n_scored <= seq_len:
                raise UsageError(f"{record.place}: a choice has {n_scored} tokens, not 1-{seq_len}")
            ids = torch.tensor(ids[-(seq_len + 1) :])  # cut off the beginning
            scored = [(len(ids) - n_scored, len(ids))]
            yield Row(unit, *next_tokens(ids, scored), len(choice.encode()))


def answers(units: list[tuple[tuple, np.ndarray]]) -> dict:
    """Return counts and the shares of correct answers. `units` come from `Scorer.units`.

    "acc" takes the choice with the highest log-likelihood, "acc_norm" the choice with the highest
    log-likelihood per byte of UTF-8. If choices have equal scores, the first one counts.
    "chance" is the expected share with random answers.
    """
    rows = []  # one per question
    for (_, right, is_truncated), scores in units:
        nll = scores[:, 0]  # one per choice
        nll_per_byte = nll / scores[:, 3]
        correct = [nll.argmin() == right, nll_per_byte.argmin() == right]
        rows.append([*correct, 1 / len(scores), is_truncated])
    acc, acc_norm, chance, truncated = np.array(rows, float).T
    metrics = {
        "acc": ratio(acc, np.ones_like(acc), partial(min, 1.0)),
        "acc_norm": ratio(acc_norm, np.ones_like(acc), partial(min, 1.0)),
        "chance": dict.fromkeys(("value", "low", "high"), chance.mean()),
    }
    n_truncated = int(sum(truncated))
    return {"units": len(units), "unit": "questions", "truncated": n_truncated, "metrics": metrics}
