"""How DeepSpeed ZeRO-1 and 2 divide the fp32 weights among the processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """What this process holds of one parameter: `numel` elements, possibly none."""

    parameter: nn.Parameter
    in_parameter: slice  # where they are in the flattened parameter
    in_partition: slice  # and in this process's partition
    numel: int
    split: bool  # whether a boundary between two processes runs through the parameter


@dataclass(frozen=True)
class Partition:
    """One process's share of a parameter group, which is what its optimizer steps."""

    fp32: Tensor  # (numel,)
    parts: list[Part]  # of every parameter of the group, in the same order on every process


def partitions(zero, rank: int) -> Iterator[Partition]:
    """What this process steps, for every parameter group of a DeepSpeed optimizer.

    ZeRO-1 and 2 lay the parameters of a group end to end and give every process an equal part of
    that line. (The `_hp_mapping` that DeepSpeed notes at each parameter is about the same, but
    takes no notice of "round_robin_gradients", which changes the order.)
    """
    if hasattr(zero, "single_partition_of_fp32_groups"):
        stepped, groups = zero.single_partition_of_fp32_groups, zero.round_robin_bit16_groups
        offsets = zero.round_robin_bit16_offsets
    else:  # ZeRO-1 in bf16 with fp32 gradients is a class with other names
        stepped, groups = zero.fp32_groups_flat_partition, zero.bf16_groups
        offsets = [accumulate((p.numel() for p in group[:-1]), initial=0) for group in groups]
    for fp32, group, firsts in zip(stepped, groups, offsets, strict=True):
        here = rank * fp32.numel()
        parts = []
        for parameter, first in zip(group, firsts, strict=True):
            last = first + parameter.numel() - 1
            split = first // fp32.numel() != last // fp32.numel()
            start = max(first, here)
            end = max(start, min(last + 1, here + fp32.numel()))  # start, if nothing is held
            inside, at = slice(start - first, end - first), slice(start - here, end - here)
            parts.append(Part(parameter, inside, at, end - start, split))
        yield Partition(fp32, parts)
