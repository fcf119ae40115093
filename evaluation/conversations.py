"""How likely the answers of conversations are: the assistant's tokens alone count."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from data.chat_template import encode_conversation
from data.conversation_set import ConversationSet
from data.conversations import Turn, parse_conversation
from data.corpus import Record, load_json
from data.tokenizer import Tokenizer
from evaluation.scoring import Row
from model import IGNORE_INDEX
from training.validation import spread


@dataclass
class CutCounts:
    """What became of conversations that are longer than the context."""

    cut: int = 0  # after the last answer within it
    left_out: int = 0  # not even the first answer ends within it


def prepared_rows(dataset: ConversationSet, max_samples: int) -> Iterator[Row]:
    """Those that the validation of a training run reads; each conversation is a unit."""
    for i in spread(len(dataset), max_samples):
        tokens, targets = dataset[i]
        n_targets = int((targets != IGNORE_INDEX).sum())
        yield Row(i, tokens, targets, n_targets * dataset.bytes_per_token)


def conversation_rows(
    records: Iterable[Record], tokenizer: Tokenizer, seq_len: int, counts: CutCounts
) -> Iterator[Row]:
    """Conversations as training reads them, see `ConversationSet`. Raises DataError: a line that is
    no conversation; names file and line."""
    for number, record in enumerate(records):
        turns = parse_conversation(load_json(record), record.place)
        row = conversation_row(number, turns, tokenizer, seq_len)
        if row is None:
            counts.left_out += 1
            continue
        said = sum(turn.counts for turn in turns)
        counts.cut += count_answers(row.targets) < said
        yield row


def conversation_row(
    unit: int, turns: list[Turn], tokenizer: Tokenizer, seq_len: int
) -> Row | None:
    """To the end of the last answer within seq_len targets; None if there is none."""
    ids, counts = encode_conversation(tokenizer, turns)
    ends = [at for at, id in enumerate(ids) if counts[at] and id == tokenizer.eos_id]
    within = [end for end in ends if end <= seq_len]
    if not within:
        return None
    end = within[-1]
    targets = [id if counts[at] else IGNORE_INDEX for at, id in enumerate(ids[: end + 1])]
    answers = [turn.content for turn in turns if turn.counts][: len(within)]
    n_bytes = sum(len(answer.encode()) for answer in answers)
    return Row(unit, torch.tensor(ids[:end]), torch.tensor(targets[1:]), n_bytes)


def count_answers(targets: torch.Tensor) -> int:
    """Stretches of targets that count."""
    counted = torch.nn.functional.pad((targets != IGNORE_INDEX).int(), (1, 0))
    return int((counted.diff() == 1).sum())
