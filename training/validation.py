"""Validation: loss, perplexity and bits per byte over all processes."""

import math

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Subset

from data.dataset import PackedDataset
from model import IGNORE_INDEX


def validation_loader(
    dataset: PackedDataset, batch_size: int, max_samples: int, accelerator: Accelerator
) -> DataLoader:
    """Return this process's batches of at most max_samples sequences (0: all), evenly spread."""
    chosen = spread(len(dataset), max_samples)
    if dataset.lengths is not None:  # equal lengths need little padding
        chosen.sort(key=lambda i: dataset.lengths[i])
    loader = DataLoader(
        Subset(dataset, chosen),
        batch_size,
        collate_fn=getattr(dataset, "collate", None),
        generator=torch.Generator(),  # without it the loader draws from dropout's generator
    )
    return accelerator.prepare_data_loader(loader)


def spread(n: int, most: int) -> list[int]:
    """Return at most `most` (0: all) of the numbers below n, in order and evenly spread."""
    return np.linspace(0, n - 1, n if most == 0 else min(n, most)).astype(int).tolist()


@torch.no_grad()
def validate(
    model: nn.Module, loader: DataLoader, accelerator: Accelerator, bytes_per_token: float
) -> dict:
    """Return the mean "loss" in nats over every target that counts, of all processes, "perplexity",
    "bits_per_byte", which compares models with different tokenizers, and the count of "samples"."""
    model.eval()
    total, weight, samples = 0.0, 0, 0
    for tokens, targets in loader:
        with torch.compiler.set_stance("force_eager"):  # to compile again would cost more
            per_token = model(tokens, targets, reduction="none").loss  # (B, T), 0 where ignored
        per_sample = per_token.sum(dim=1), (targets != IGNORE_INDEX).sum(dim=1)  # (B,) each
        # It drops the samples that were repeated to give every process a whole batch.
        losses, counts = accelerator.gather_for_metrics(per_sample)
        total += losses.double().sum().item()
        weight += counts.sum().item()
        samples += len(losses)
    model.train()
    loss = total / weight if weight else math.nan
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),
        "bits_per_byte": loss / math.log(2) / bytes_per_token,
        "samples": samples,
    }
