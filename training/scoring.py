"""How likely a model finds rows of tokens, computed by all processes together."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from model import IGNORE_INDEX, Transformer

BLOCK_ROWS = 1024  # rows in memory at a time, sorted by length so that little is padded


class Row(NamedTuple):
    """What the model reads at once: a document, a window of one, or a question with one choice."""

    unit: Hashable  # to what the row belongs; rows of one unit follow each other
    tokens: Tensor  # (T,) int64
    targets: Tensor  # (T,) int64; IGNORE_INDEX where the token is context only
    n_bytes: int  # of the text behind the targets


class Score(NamedTuple):
    """Of one row: sums over its targets."""

    nll: float  # negative log-likelihood in nats
    hits: float  # targets that were the likeliest token
    n_tokens: float
    n_bytes: float


@dataclass
class Scorer:
    """A model on this process's device, and how it is to be run.

    The rows and their order are the same on every process; each computes its share of the batches
    and every process gets all results.
    """

    model: Transformer  # in evaluation mode, on the device
    accelerator: Accelerator
    batch_size: int
    dtype: torch.dtype = torch.float32  # bfloat16 runs under autocast; losses are fp32 in any case

    def batches(self, loader: DataLoader) -> Iterator[list[float]]:
        """[nll, hits, tokens] of each row of a loader that Accelerate has prepared, in order.

        Args:
            loader: of (tokens, targets), both (B, T) int64.
        """
        device = self.accelerator.device.type
        autocast = torch.autocast(device, torch.bfloat16, self.dtype == torch.bfloat16)
        for tokens, targets in loader:
            with torch.inference_mode(), autocast:
                logits = self.model(tokens).logits  # (B, T, vocab_size)
                nll = self.model.token_loss(logits, targets, "none").double()  # (B, T)
                hits, counted = logits.argmax(dim=-1) == targets, targets != IGNORE_INDEX
                sums = torch.stack([nll.sum(1), hits.sum(1), counted.sum(1)], dim=1)
            # The last batches are filled up with rows from the start, so that every process has
            # equally many; gather_for_metrics drops them again.
            yield from self.accelerator.gather_for_metrics(sums).tolist()

    def rows(self, rows: Iterable[Row]) -> Iterator[tuple[Row, Score]]:
        """Every row with its score, in order; memory is bounded by BLOCK_ROWS of them."""
        rows = iter(rows)
        while block := list(islice(rows, BLOCK_ROWS)):
            order = sorted(range(len(block)), key=lambda i: -len(block[i].tokens))
            loader = DataLoader([block[i] for i in order], self.batch_size, collate_fn=pad)
            # Not accelerator.prepare, which would keep every block's loader to the end.
            loader = prepare_data_loader(loader, self.accelerator.device, put_on_device=True)
            sums = dict(zip(order, self.batches(loader), strict=True))
            for i, row in enumerate(block):
                yield row, Score(*sums[i], row.n_bytes)

    def units(self, rows: Iterable[Row]) -> Iterator[tuple[Hashable, list[Score]]]:
        """Every unit with the scores of its rows, in order."""
        for unit, scored in groupby(self.rows(rows), key=lambda pair: pair[0].unit):
            yield unit, [score for _, score in scored]


def pad(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """(tokens, targets), both (B, T) with T of the longest row; what is added on the right counts
    nowhere, and as attention is causal no earlier position sees it."""
    tokens = pad_sequence([row.tokens for row in rows], batch_first=True)
    targets = pad_sequence([row.targets for row in rows], True, IGNORE_INDEX)
    return tokens, targets
