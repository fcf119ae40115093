"""The rows of texts, conversations and prepared data, which lm/evaluation/scoring.py scores."""

from collections.abc import Iterable, Iterator

import torch

from lm.common.errors import UsageError
from lm.data.conversations import encode_conversation, parse_conversation
from lm.data.corpus import Record, load_json, parse
from lm.data.dataset import TokenStream, next_tokens
from lm.data.encoding import MARKERS
from lm.data.tokenizer import Tokenizer
from lm.evaluation.scoring import Row
from model import IGNORE_INDEX


def document_rows(
    records: Iterable[Record], tokenizer: Tokenizer, seq_len: int, stride: int, counts: dict
) -> Iterator[Row]:
    """Yield the windows of each document `<s> text </s>`; `Row.unit` is the document's index.

    A window has up to seq_len ids. The next window begins `stride` ids later. Each id after <s> is
    predicted once. Its context is all ids before it, or at least seq_len - stride + 1 of them.
    `counts` counts texts that the tokenizer changes; their bytes are those of the changed text. It
    also counts texts that hold names of markers (see `lm.data.encoding`).
    """
    for number, record in enumerate(records):
        text = parse(record)
        if not text:
            continue
        if MARKERS.search(text):
            counts["with_markers_as_text"] += 1
        ids = tokenizer.encode(text)
        if tokenizer.change(text, ids):
            counts["changed_by_tokenizer"] += 1
            text = tokenizer.decode(ids)
        ids = [tokenizer.bos_id, *ids, tokenizer.eos_id]
        last = len(ids) - 1
        for start in range(0, max(1, last - seq_len + stride), stride):
            end = min(start + seq_len, last)
            targets = torch.tensor(ids[start + 1 : end + 1])
            if start:  # the previous window has predicted these targets
                targets[: seq_len - stride] = IGNORE_INDEX
            n_bytes = 0 if start else len(text.encode())  # all bytes count in the first window
            yield Row(number, torch.tensor(ids[start:end]), targets, n_bytes)


def conversation_rows(
    records: Iterable[Record], tokenizer: Tokenizer, seq_len: int, counts: dict[str, int]
) -> Iterator[Row]:
    """Yield one row for each conversation, as training reads it (see `ConversationSet`).

    `Row.unit` is the conversation's index. A long conversation is cut after the last answer that
    ends within seq_len targets. It is left out if no answer ends within seq_len targets. `counts`
    counts both cases, as "cut" and "left_out", and the conversations that the tokenizer changes.
    Raises UsageError if a record is wrong.
    """
    for number, record in enumerate(records):
        turns, _ = parse_conversation(load_json(record), record.place)
        try:
            ids, answers = encode_conversation(tokenizer, turns, record.place)
        except UsageError:
            counts["changed_by_tokenizer"] += 1
            ids, answers = encode_conversation(tokenizer, turns)
        within = [(begin, end) for begin, end in answers if end <= seq_len + 1]
        if not within:
            counts["left_out"] += 1
            continue
        counts["cut"] += len(within) < len(answers)
        said = [turn.content for turn in turns if turn.counts][: len(within)]
        n_bytes = sum(len(content.encode()) for content in said)
        yield Row(number, *next_tokens(torch.tensor(ids[: within[-1][1]]), within), n_bytes)


def prepared_rows(dataset: TokenStream, samples: list[int], units: list[int]) -> Iterator[Row]:
    """Yield a row for each index in `samples`. `units` has the units of the rows, in order."""
    for i, unit in zip(samples, units, strict=True):
        tokens, targets = dataset[i]
        n_targets = int((targets != IGNORE_INDEX).sum())
        yield Row(unit, tokens, targets, n_targets * dataset.bytes_per_token)
