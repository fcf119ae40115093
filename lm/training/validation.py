"""Validation: compute loss, perplexity and bits per byte of the validation data."""

import gzip
import lzma
import math
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Subset

from lm.data.dataset import TokenStream, pad
from lm.data.order import spread
from lm.data.tokenizer import Tokenizer
from model import IGNORE_INDEX
from model.cache import without_cudnn

COMPRESSED = 2**20  # tokens of a text that `yardsticks` compresses, at most


def validation_loader(
    dataset: TokenStream, batch_size: int, max_samples: int, accelerator: Accelerator
) -> DataLoader:
    """Return a loader for this process. All loaders together read at most max_samples (0: all)."""
    chosen = spread(len(dataset), max_samples)
    if dataset.lengths is not None:  # similar lengths need little padding
        chosen.sort(key=lambda i: dataset.lengths[i])
    loader = DataLoader(
        Subset(dataset, chosen),
        batch_size,
        collate_fn=pad,
        generator=torch.Generator(),  # the default generator also draws dropout masks
    )
    return accelerator.prepare_data_loader(loader)


@torch.no_grad()
def validate(
    model: nn.Module,
    loader: DataLoader,
    accelerator: Accelerator,
    bytes_per_token: float,
    stops: Callable[[], object] = lambda: None,
) -> dict | None:
    """Return "loss", the mean in nats over the counted targets of all processes; "perplexity";
    "bits_per_byte", comparable between tokenizers; "samples", the number of sequences. Return None
    once `stops`, which is called before each batch, returns something true on every process."""
    model.eval()
    total_loss, n_targets, samples = 0.0, 0, 0
    for tokens, targets in loader:
        if stops():
            loader.end()  # else Accelerate might take the next micro-batch for the last of a step
            model.train()
            return None
        # Do not compile for evaluation; nor compile, nor let cuDNN plan, for each length.
        with torch.compiler.set_stance("force_eager"), without_cudnn():
            per_token = model(tokens, targets, reduction="none").loss  # (B, T), 0 where ignored
        per_sample = per_token.sum(dim=1), (targets != IGNORE_INDEX).sum(dim=1)  # (B,) each
        # Accelerate repeats samples to fill the last batch; gather_for_metrics drops the copies.
        losses, counts = accelerator.gather_for_metrics(per_sample)
        total_loss += losses.double().sum().item()
        n_targets += counts.sum().item()
        samples += len(losses)
    model.train()
    loss = total_loss / n_targets if n_targets else math.nan
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),
        "bits_per_byte": loss / math.log(2) / bytes_per_token,
        "samples": samples,
    }


def yardsticks(data: TokenStream, tokenizer: Tokenizer) -> dict[str, float]:
    """Return bits per byte to compare a model's with: of an untrained model, which predicts every
    token with equal probability, and of the same text compressed by gzip -9 and xz -9."""
    chosen = range(min(len(data), 1 + COMPRESSED // data.seq_len))
    tokens = torch.cat([data[i][0] for i in chosen]).tolist()
    text = tokenizer.decode(tokens).encode()
    return {
        "untrained": math.log2(data.vocab_size) / data.bytes_per_token,
        "gzip": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz": 8 * len(lzma.compress(text, preset=9)) / len(text),
    }
