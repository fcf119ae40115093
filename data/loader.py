"""Micro-batches for training, without an end."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.order import MicroBatchSampler


def micro_batches(
    dataset: Dataset, sampler: MicroBatchSampler, num_workers: int, pin_memory: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, targets) on the CPU, each (batch_size, max_seq_len), or as the data set's own
    `collate` makes them.

    Args:
        num_workers: processes that read ahead; 0 reads in this one.
        pin_memory: for copies to a GPU that wait for nothing.
    """
    # A generator of its own: the loader draws nothing from the global one, which drives dropout.
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),
        collate_fn=getattr(dataset, "collate", None),
    )
    yield from loader
