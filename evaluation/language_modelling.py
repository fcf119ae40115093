"""Loss, perplexity, bits per byte and top-1 accuracy on text, conversations and prepared data."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from data.chat_template import encode_conversation
from data.conversations import parse_conversation
from data.corpus import Record, load_json, parse
from data.dataset import TokenStream
from data.errors import DataError
from data.tokenizer import Tokenizer
from evaluation.intervals import UnitSums
from evaluation.scoring import Row, Scorer
from model import IGNORE_INDEX

NLL, HITS, TOKENS, BYTES = range(4)


def windows(ids: list[int], seq_len: int, stride: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (tokens, targets) of windows that together predict ids[1:], each id exactly once.

    A window reads up to seq_len ids and the next begins `stride` further. The first predicts after
    every id that it reads; the others only what no window before them did, so that each prediction
    has all ids before it as context, or at least seq_len - stride of them: a smaller stride, 1 to
    seq_len, gives more context and takes more windows. `ids` is a document with its begin and end
    markers.
    """
    done = 0  # ids[1:done + 1] are predicted
    for start in range(0, len(ids), stride):
        end = min(start + seq_len, len(ids) - 1)
        context_only = [IGNORE_INDEX] * (done - start)
        yield ids[start:end], context_only + ids[done + 1 : end + 1]
        done = end
        if done == len(ids) - 1:
            return


def document_rows(
    records: Iterable[Record], tokenizer: Tokenizer, seq_len: int, stride: int
) -> Iterator[Row]:
    """Yield the windows of every document, `<s> text </s>` as in training; empty text is left out.

    A document is a unit. So is each section of a long .txt file, though neighbouring sections are
    hardly independent.
    """
    for number, record in enumerate(records):
        text = parse(record)
        if not text:
            continue
        ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
        n_bytes = len(text.encode())
        for tokens, targets in windows(ids, seq_len, stride):
            yield Row(number, torch.tensor(tokens), torch.tensor(targets), n_bytes)
            n_bytes = 0  # counted once, with the first window


def conversation_rows(
    records: Iterable[Record], tokenizer: Tokenizer, seq_len: int, counts: Counter
) -> Iterator[Row]:
    """Yield conversations as training reads them (see `ConversationSet`); each is a unit.

    Args:
        counts: "cut" counts the conversations that are cut after the last answer that ends within
            seq_len targets, "left_out" those whose first answer does not end there.

    Raises DataError: a line that is no conversation; names file and line.
    """
    for number, record in enumerate(records):
        turns = parse_conversation(load_json(record), record.place)
        ids, is_answer = encode_conversation(tokenizer, turns)
        ends = [at for at, id in enumerate(ids) if is_answer[at] and id == tokenizer.eos_id]
        within = [end for end in ends if end <= seq_len]
        counts["left_out"] += not within
        counts["cut"] += 0 < len(within) < len(ends)
        if not within:
            continue
        end = within[-1]
        targets = [ids[at] if is_answer[at] else IGNORE_INDEX for at in range(1, end + 1)]
        answers = [turn.content for turn in turns if turn.counts][: len(within)]
        n_bytes = sum(len(answer.encode()) for answer in answers)
        yield Row(number, torch.tensor(ids[:end]), torch.tensor(targets), n_bytes)


def prepared_rows(
    dataset: TokenStream, samples: Iterable[int], units: Iterable[int]
) -> Iterator[Row]:
    """Yield these samples of prepared data, each with the unit that it belongs to."""
    for i, unit in zip(samples, units, strict=True):
        tokens, targets = dataset[i]
        n_targets = int((targets != IGNORE_INDEX).sum())
        yield Row(unit, tokens, targets, n_targets * dataset.bytes_per_token)


def unit_sums(scorer: Scorer, rows: Iterable[Row]) -> UnitSums:
    """Score rows and add up NLL, HITS, TOKENS and BYTES over the units."""
    sums = UnitSums(4)
    for _, scores in scorer.units(rows):
        sums.add(np.sum(scores, axis=0))
    return sums


def summary(sums: UnitSums, source: str) -> dict:
    """Return how much of a source was scored, and the metrics: loss in nats per token, perplexity =
    exp(loss), bits per byte, top-1 accuracy. Raises DataError: nothing was scored."""
    if not sums.n:
        raise DataError(f"{source}: no text, or no answer within the context, to score")
    loss = sums.ratio(NLL, TOKENS)
    metrics = {
        "loss": loss,
        "perplexity": loss.map(lambda x: math.exp(min(x, 700))),
        "bits_per_byte": sums.ratio(NLL, BYTES).map(lambda x: x / math.log(2)),
        "accuracy": sums.ratio(HITS, TOKENS).map(lambda x: min(x, 1.0)),
    }
    totals = {"tokens": int(sums.totals[TOKENS]), "bytes": round(sums.totals[BYTES])}
    return {"units": sums.n, "unit": "documents", **totals, "metrics": metrics}
