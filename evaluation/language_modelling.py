"""Loss, perplexity, bits per byte and top-1 accuracy of a model on text or on packed tokens."""

import math
from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np
import torch

from data.corpus import Record, parse
from data.dataset import PackedDataset
from data.tokenizer import Tokenizer
from evaluation.intervals import Estimate, UnitSums
from evaluation.scoring import Row, Scorer
from model import IGNORE_INDEX
from training.validation import spread, validation_loader

NLL, HITS, TOKENS, BYTES = range(4)


def windows(ids: list[int], seq_len: int, stride: int) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens, targets) of windows that together predict ids[1:], each id exactly once.

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
    """The windows of every document, `<s> text </s>` as in training; an empty text is none."""
    for number, record in enumerate(records):
        text = parse(record)
        if not text:
            continue
        ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
        n_bytes = len(text.encode())
        for tokens, targets in windows(ids, seq_len, stride):
            yield Row(number, torch.tensor(tokens), torch.tensor(targets), n_bytes)
            n_bytes = 0  # counted once, with the first window


def text_sums(scorer: Scorer, rows: Iterable[Row]) -> UnitSums:
    """What the model makes of documents, which are the units; so is each section of a long .txt
    file, though neighbours there hardly are independent."""
    sums = UnitSums(4)
    for _, scores in scorer.units(rows):
        sums.add(np.sum(scores, axis=0))
    return sums


def packed_sums(
    scorer: Scorer, dataset: PackedDataset, max_samples: int, bos_id: int, progress
) -> UnitSums:
    """The same for packed sequences, those that the validation of a training run reads.

    A sequence begins anywhere and sees nothing before itself, and begin markers are predicted too,
    as in training. Sequences that begin in the same document make one unit. `max_samples` is
    `--eval_samples` of training (0: all), `progress` is called with 1 for every sequence scored.
    """
    loader = validation_loader(dataset, scorer.batch_size, max_samples, scorer.accelerator)
    units = dataset.documents_of(spread(len(dataset), max_samples), bos_id)
    sums = UnitSums(4)
    scored = zip(units, scorer.batches(loader), strict=True)
    for _, sequences in groupby(scored, key=lambda pair: pair[0]):
        total = np.zeros(4)
        for _, (nll, hits, n_tokens) in sequences:
            total += (nll, hits, n_tokens, n_tokens * dataset.bytes_per_token)
            progress(1)
        sums.add(total)
    return sums


def metrics(sums: UnitSums) -> dict[str, Estimate]:
    """Loss in nats per token, perplexity = exp(loss), bits per byte, top-1 accuracy."""
    loss = sums.ratio(NLL, TOKENS)
    return {
        "loss": loss,
        "perplexity": loss.map(lambda x: math.exp(min(x, 700))),
        "bits_per_byte": sums.ratio(NLL, BYTES).map(lambda x: x / math.log(2)),
        "accuracy": sums.ratio(HITS, TOKENS).map(lambda x: min(x, 1.0)),
    }


def summary(sums: UnitSums) -> dict:
    """How much was scored, and the metrics."""
    totals = {"tokens": int(sums.totals[TOKENS]), "bytes": round(sums.totals[BYTES])}
    return {"units": sums.n, "unit": "documents", **totals, "metrics": metrics(sums)}
