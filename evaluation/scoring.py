"""Log-likelihoods of rows of tokens under a model, by all processes together, and their means."""

import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from common.errors import UsageError
from model import IGNORE_INDEX, Transformer
from model.cache import without_cudnn
from training.engine.device import has_bf16, keep_freed_memory, use_all_cores

LEAST_UNITS = 3  # for an interval
BLOCK_ROWS = 1024  # rows in memory at a time, sorted by length so that little is padded


class Row(NamedTuple):
    """A sequence to score: a document, a window of one, or a question with a choice."""

    unit: Hashable  # what the row belongs to; rows of one unit follow each other
    tokens: Tensor  # (T,) int64
    targets: Tensor  # (T,) int64; IGNORE_INDEX where the token is context only
    n_bytes: float  # of the text behind the targets


@dataclass
class Scorer:
    """A model on this process's device. The rows and their order are the same on every process;
    each computes its share of the batches, and every process gets all results."""

    model: Transformer  # in evaluation mode, on the device
    accelerator: Accelerator
    batch_size: int
    dtype: torch.dtype = torch.float32  # bfloat16 runs under autocast; losses are fp32 in any case

    def units(self, rows: Iterable[Row]) -> Iterator[tuple[Hashable, np.ndarray]]:
        """Yield every unit, in order, with float64 sums of shape (rows, 4) over its targets:
        negative log-likelihood in nats, targets that were the likeliest token, targets, bytes.
        Raises UsageError: a score is NaN or infinite."""
        rows = iter(rows)
        blocks = iter(lambda: list(islice(rows, BLOCK_ROWS)), [])
        for unit, same in groupby(chain.from_iterable(map(self._scored, blocks)), itemgetter(0)):
            yield unit, np.array([sums for _, sums in same])

    def _scored(self, block: list[Row]) -> Iterator[tuple[Hashable, list[float]]]:
        """Yield the unit and the sums of every row, in order."""
        order = sorted(range(len(block)), key=lambda i: -len(block[i].tokens))
        loader = DataLoader([block[i] for i in order], self.batch_size, collate_fn=pad)
        # Not accelerator.prepare, which would keep every block's loader to the end.
        loader = prepare_data_loader(loader, self.accelerator.device, put_on_device=True)
        device, is_bf16 = self.accelerator.device.type, self.dtype == torch.bfloat16
        autocast, sums = torch.autocast(device, torch.bfloat16, is_bf16), []
        for tokens, targets in loader:
            with torch.inference_mode(), autocast, without_cudnn():
                scored = self.model(tokens, targets, "hits")
                nll, counted = scored.loss.double(), targets != IGNORE_INDEX  # (B, T)
                batch = torch.stack([nll.sum(1), scored.hits.sum(1), counted.sum(1)], dim=1)
            # The last batches are filled up with rows from the start, so that every process has
            # equally many; gather_for_metrics drops them again.
            sums += self.accelerator.gather_for_metrics(batch).tolist()
        if not np.isfinite(sums).all():
            raise UsageError("what the model says is not a number: its weights are broken")
        sums_of = dict(zip(order, sums, strict=True))
        for i, row in enumerate(block):
            yield row.unit, [*sums_of[i], row.n_bytes]


def pad(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets), both (B, T), padded on the right, where no earlier token looks."""
    tokens = pad_sequence([row.tokens for row in rows], batch_first=True)
    targets = pad_sequence([row.targets for row in rows], True, IGNORE_INDEX)
    return tokens, targets


def build_scorer(
    model: Transformer, batch_size: int, device: str = "auto", dtype: str | None = None
) -> Scorer:
    """Put the model on this process's device, under whatever launcher there is.

    Args:
        device: "cpu", "cuda", or "auto" for a GPU where there is one.
        dtype: "float32" or "bfloat16"; None is bfloat16 on a GPU that has it, else float32.

    Raises UsageError: device and launcher do not go together.
    """
    n_gpus, environ = torch.cuda.device_count(), os.environ
    if device == "cuda" and not n_gpus:
        raise UsageError("--device cuda: no GPU is visible here")
    on_cpu = device == "cpu" or not n_gpus
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= {*environ} and "RANK" not in environ:
        raise UsageError("pass --multi_gpu to accelerate launch, on CPUs too, and not --cpu")
    n_local = int(environ.get("LOCAL_WORLD_SIZE", 1))
    if not on_cpu and n_local > n_gpus:
        raise UsageError(f"{n_local} processes for {n_gpus} GPUs: pass --num_processes {n_gpus}")
    # Nothing is trained: every process has the whole model, whichever engine the launcher is for.
    environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    accelerator = Accelerator(mixed_precision="no", cpu=on_cpu)
    if on_cpu:
        keep_freed_memory()
        use_all_cores()
    dtype = dtype or ("bfloat16" if not on_cpu and has_bf16() else "float32")
    return Scorer(model.to(accelerator.device), accelerator, batch_size, getattr(torch, dtype))


def ratio(
    tops: np.ndarray, bottoms: np.ndarray, scale: Callable[[float], float] = float
) -> dict[str, float | None]:
    """Return total over total, as "value", and its 95% interval, "low" to "high": None for fewer
    than LEAST_UNITS units, which are documents, conversations or questions.

    Tokens of one document resemble each other, so the units count. With R the ratio and n units,
    the variance of R is about n / (n - 1) · Σ (top - R · bottom)² / (Σ bottom)² (Cochran, Sampling
    Techniques, 3rd ed. 1977, section 6.4). The interval does not reach below 0.

    Args:
        tops, bottoms: float64 of shape (units,), none negative.
        scale: an increasing function for the number and the ends of its interval.
    """
    n, total = len(tops), sum(bottoms)
    r = sum(tops) / total
    if n < LEAST_UNITS:
        return {"value": scale(r), "low": None, "high": None}
    half = 1.96 * math.sqrt(n / (n - 1) * np.square(tops - r * bottoms).sum()) / total
    return {"value": scale(r), "low": scale(max(0.0, r - half)), "high": scale(r + half)}
