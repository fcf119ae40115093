"""Multiple-choice questions, answered with the choice that the model finds likeliest."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

import torch

from data.chat_template import encode_conversation
from data.conversations import ASSISTANT, USER, Turn
from data.corpus import Record
from data.errors import DataError
from data.tokenizer import Tokenizer
from evaluation.intervals import Estimate, wilson
from evaluation.questions import Question, parse_question
from evaluation.scoring import Row, Scorer
from model import IGNORE_INDEX


@dataclass
class ChoiceCounts:
    """How the questions so far were answered."""

    n: int = 0
    right: int = 0  # by the log-likelihood of the whole choice
    right_normalised: int = 0  # by log-likelihood per byte of the choice
    by_chance: float = 0.0  # right answers that guessing would give on average
    truncated: int = 0  # questions of which the beginning did not fit into the context

    def metrics(self) -> dict[str, Estimate]:
        """Shares with Wilson intervals; "chance" is exact."""
        chance = self.by_chance / self.n
        return {
            "acc": wilson(self.right, self.n),
            "acc_norm": wilson(self.right_normalised, self.n),
            "chance": Estimate(chance, chance, chance),
        }


def encode_choices(
    question: Question, tokenizer: Tokenizer, delimiter: str
) -> tuple[list[list[int]], int]:
    """Ids of `<s> question delimiter choice` for every choice, and how many of them are context.

    The end of a question and the start of a choice may share a token. Therefore everything is
    encoded whole, and context is what the question alone and all of its choices have in common:
    behind it every choice is scored from the same place.

    Raises DataError: a choice that adds no token; names file and line.
    """
    texts = [question.text + delimiter + choice for choice in question.choices]
    encoded = tokenizer.encode_batch([question.text, *texts])
    equal = takewhile(lambda column: len(set(column)) == 1, zip(*encoded, strict=False))
    n_context = 1 + len(list(equal))  # <s> too
    ids = [[tokenizer.bos_id, *choice] for choice in encoded[1:]]
    for i, choice in enumerate(ids):
        if len(choice) == n_context:
            raise DataError(f"{question.place}: choice {i} adds no token to the question")
    return ids, n_context


def encode_turns(question: Question, tokenizer: Tokenizer) -> tuple[list[list[int]], list[int]]:
    """The same as a conversation: ids of the question and each choice as its answer, to the end
    piece, and how many of them are context."""
    all_ids, contexts = [], []
    for choice in question.choices:
        turns = [Turn(USER, question.text), Turn(ASSISTANT, choice)]
        ids, counts = encode_conversation(tokenizer, turns)
        contexts.append(counts.index(True))
        all_ids.append(ids[: contexts[-1] + sum(counts)])
    return all_ids, contexts


def question_rows(
    records: Iterable[Record],
    tokenizer: Tokenizer,
    seq_len: int,
    delimiter: str | None,
    counts: ChoiceCounts,
) -> Iterator[Row]:
    """One row per choice; the unit is its Question. Where a question with a choice is longer than
    the context, its beginning is left out, and counted. Without a delimiter they are turns of a
    conversation.

    Raises DataError: a line that is no question, or a choice that alone is longer than the context.
    """
    for record in records:
        question = parse_question(record)
        if delimiter is None:
            all_ids, contexts = encode_turns(question, tokenizer)
        else:
            all_ids, n_context = encode_choices(question, tokenizer, delimiter)
            contexts = [n_context] * len(all_ids)
        counts.truncated += max(map(len, all_ids)) > seq_len + 1
        for choice, ids, n_context in zip(question.choices, all_ids, contexts, strict=True):
            n_scored = len(ids) - n_context
            if n_scored > seq_len:
                raise DataError(
                    f"{question.place}: a choice of {n_scored} tokens does not fit into the "
                    f"context of {seq_len}"
                )
            ids = ids[-(seq_len + 1) :]
            targets = [IGNORE_INDEX] * (len(ids) - 1 - n_scored) + ids[len(ids) - n_scored :]
            yield Row(question, torch.tensor(ids[:-1]), torch.tensor(targets), len(choice.encode()))


def answer(scorer: Scorer, rows: Iterable[Row], counts: ChoiceCounts) -> None:
    """Have the model answer all questions and count; of equal choices the first is taken.

    Length-normalised means per byte of UTF-8 of the choice without the delimiter, so that it does
    not depend on the tokenizer; lm-evaluation-harness divides by characters, for ASCII the same.
    """
    for question, scores in scorer.units(rows):
        whole = [score.nll for score in scores]
        per_byte = [score.nll / score.n_bytes for score in scores]
        counts.n += 1
        counts.right += whole.index(min(whole)) == question.answer
        counts.right_normalised += per_byte.index(min(per_byte)) == question.answer
        counts.by_chance += 1 / len(scores)
