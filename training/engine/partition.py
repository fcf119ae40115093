"""How DeepSpeed ZeRO-1 and 2 divide the fp32 weights among the processes."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """What this process holds of one parameter: `numel` elements, possibly none.

    They begin at `start` in the flattened parameter and at `offset` in this process's partition.
    """

    parameter: nn.Parameter
    start: int
    offset: int
    numel: int
    split: bool  # whether a boundary between two processes runs through the parameter

    @property
    def in_partition(self) -> slice:
        return slice(self.offset, self.offset + self.numel)

    @property
    def in_parameter(self) -> slice:
        return slice(self.start, self.start + self.numel)


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
        offsets = [_end_to_end(group) for group in groups]
    for fp32, group, firsts in zip(stepped, groups, offsets, strict=True):
        here = rank * fp32.numel()
        parts = []
        for parameter, first in zip(group, firsts, strict=True):
            end = first + parameter.numel()
            held = max(first, here), min(end, here + fp32.numel())
            numel = max(0, held[1] - held[0])
            split = first // fp32.numel() != (end - 1) // fp32.numel()
            start, offset = (held[0] - first, held[0] - here) if numel else (0, 0)
            parts.append(Part(parameter, start, offset, numel, split))
        yield Partition(fp32, parts)


def _end_to_end(parameters: list[nn.Parameter]) -> list[int]:
    offsets, end = [], 0
    for parameter in parameters:
        offsets.append(end)
        end += parameter.numel()
    return offsets
