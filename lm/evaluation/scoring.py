"""Score token sequences: loss, perplexity, bits per byte and accuracy, with 95% intervals."""

import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader

from lm.common.errors import UsageError
from lm.data.dataset import pad
from lm.engine.hardware import has_bf16, keep_freed_memory, processes_here, set_threads
from model import IGNORE_INDEX, Transformer
from model.cache import without_cudnn

LEAST_UNITS = 3  # results of fewer units have no interval
BLOCK_ROWS = 1024  # rows in memory at a time; sorting them by length saves padding


class Row(NamedTuple):
    """A sequence to score: a window of text, a conversation, or a question and a choice."""

    unit: Hashable  # the document, conversation or question; its rows are consecutive
    tokens: Tensor  # (T,) int64
    targets: Tensor  # (T,) int64; IGNORE_INDEX for a target that is not scored
    n_bytes: float  # UTF-8 bytes of the scored text; 0 if another row of the unit counts them


@dataclass
class Scorer:
    """Score rows with a model on the device of this process. Every process reads the same rows in
    the same order, computes its share of the batches and gets all results."""

    model: Transformer  # in evaluation mode, on the device
    accelerator: Accelerator  # gives the device and gathers scores
    batch_size: int  # rows that each process scores at once
    dtype: torch.dtype = torch.float32  # bfloat16 uses autocast; the loss is always fp32

    def units(self, rows: Iterable[Row]) -> Iterator[tuple[Hashable, np.ndarray]]:
        """Yield every unit in order, with the float64 scores of its rows, (rows, 4).

        The columns: negative log-likelihood of the scored targets in nats, number of them that
        were the most likely token, number of scored targets, `Row.n_bytes`.
        Raises UsageError if a score is not finite.
        """
        rows = iter(rows)
        blocks = iter(lambda: list(islice(rows, BLOCK_ROWS)), [])  # lists of rows
        scored = chain.from_iterable(map(self._scored, blocks))
        for unit, same in groupby(scored, itemgetter(0)):
            yield unit, np.array([sums for _, sums in same])

    def _scored(self, block: list[Row]) -> Iterator[tuple[Hashable, list[float]]]:
        """Yield the unit and the sums of each row, in the order of the block."""
        order = sorted(range(len(block)), key=lambda i: -len(block[i].tokens))  # longest first
        longest_first = [(block[i].tokens, block[i].targets) for i in order]
        loader = DataLoader(longest_first, self.batch_size, collate_fn=pad)
        # accelerator.prepare would keep the loader of every block until the program ends.
        loader = prepare_data_loader(loader, self.accelerator.device, put_on_device=True)
        is_bf16 = self.dtype == torch.bfloat16
        autocast = torch.autocast(self.accelerator.device.type, torch.bfloat16, is_bf16)
        sums = []  # sums of each row, in the order of `order`
        for tokens, targets in loader:
            with torch.inference_mode(), autocast, without_cudnn():
                scored = self.model(tokens, targets, "none")
                nll = scored.loss.double()  # (B, T)
                counted = targets != IGNORE_INDEX  # (B, T)
                batch = torch.stack([nll.sum(1), scored.hits.sum(1), counted.sum(1)], dim=1)
            # Accelerate repeats rows from the start until all processes have the same number.
            # gather_for_metrics drops the repeated rows.
            sums += self.accelerator.gather_for_metrics(batch).tolist()
        if not np.isfinite(sums).all():
            raise UsageError("the scores are not finite: the weights of the model are broken")
        sums_of = dict(zip(order, sums, strict=True))
        for i, row in enumerate(block):
            yield row.unit, [*sums_of[i], row.n_bytes]


def build_scorer(model: Transformer, batch_size: int, device="auto", dtype=None) -> Scorer:
    """Return a Scorer whose model is on the device of this process. A launcher is optional.

    Args:
        device: "cpu", "cuda", or "auto" for a GPU if there is one.
        dtype: "float32", "bfloat16", or None: bfloat16 if the GPU supports it, float32 if not.
    Raises UsageError if there is no such device, or if the launcher has the wrong flags.
    """
    n_gpus, environ = torch.cuda.device_count(), os.environ
    if device == "cuda" and not n_gpus:
        raise UsageError("--device cuda: no GPU is visible here")
    on_cpu = device == "cpu" or not n_gpus
    if {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= {*environ} and "RANK" not in environ:
        raise UsageError("pass --multi_gpu, not --cpu, to accelerate launch, even on CPUs")
    if not on_cpu and processes_here() > n_gpus:
        started = f"{processes_here()} processes for {n_gpus} GPUs"
        raise UsageError(f"{started}: pass --num_processes {n_gpus}")
    # DeepSpeed must not start again: under ZeRO-3, `load_divided` has already divided the model.
    environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    accelerator = Accelerator(mixed_precision="no", cpu=on_cpu)
    if on_cpu:
        keep_freed_memory()
        set_threads()
    dtype = dtype or ("bfloat16" if not on_cpu and has_bf16() else "float32")
    return Scorer(model.to(accelerator.device), accelerator, batch_size, getattr(torch, dtype))


def ratio(tops: np.ndarray, bottoms: np.ndarray, scale: Callable = float) -> dict:
    """Return sum(tops) / sum(bottoms) as "value", and its 95% interval from "low" to "high".

    "low" and "high" are None for fewer than LEAST_UNITS units. A unit is a document, conversation
    or question: the tokens inside a unit are not independent samples. With the ratio R and n units,
    the variance of R is about n / (n - 1) · Σ (top - R · bottom)² / (Σ bottom)² (Cochran, Sampling
    Techniques, 3rd ed. 1977, section 6.4). "low" is at least scale(0).

    Args:
        tops, bottoms: float64, (units,), not negative.
        scale: an increasing function, applied to the ratio and to both ends of the interval.
    """
    n, total = len(tops), sum(bottoms)
    r = sum(tops) / total  # the ratio
    if n < LEAST_UNITS:
        return {"value": scale(r), "low": None, "high": None}
    half = 1.96 * math.sqrt(n / (n - 1) * np.square(tops - r * bottoms).sum()) / total
    return {"value": scale(r), "low": scale(max(0.0, r - half)), "high": scale(r + half)}


def summary(units: list[tuple[Hashable, np.ndarray]]) -> dict:
    """Return totals and metrics of `Scorer.units`. Loss is in nats per token. Bits per byte are
    comparable between tokenizers: the same loss, in bits, for each byte of the scored text."""
    nll, hits, tokens, n_bytes = np.array([scores.sum(axis=0) for _, scores in units]).T
    metrics = {
        "loss": ratio(nll, tokens),
        "perplexity": ratio(nll, tokens, lambda loss: math.exp(min(loss, 700))),  # no overflow
        "bits_per_byte": ratio(nll, n_bytes, lambda nats: nats / math.log(2)),
        "accuracy": ratio(hits, tokens, partial(min, 1.0)),
    }
    totals = {"tokens": int(sum(tokens)), "bytes": round(sum(n_bytes))}
    return {"units": len(units), "unit": "documents", **totals, "metrics": metrics}
