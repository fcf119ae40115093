"""The shares of the fp32 weights that DeepSpeed ZeRO gives to the processes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Part(NamedTuple):
    """The elements of one parameter that this process holds, possibly none."""

    parameter: nn.Parameter
    in_parameter: slice  # where they are in the flattened parameter
    in_partition: slice  # and in this process's partition
    numel: int
    split: bool  # whether a boundary between two processes runs through the parameter


class Partition(NamedTuple):
    """One process's share of a parameter group, which its optimizer steps."""

    fp32: Tensor  # (numel,)
    parts: list[Part]  # of every parameter, in one order on every process
    group: int  # its index in the optimizer's `param_groups`


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """Return the whole shape, also of a parameter that ZeRO-3 has left empty."""
    return getattr(parameter, "ds_shape", parameter.shape)


def gathered(*parameters: nn.Parameter, writes: bool = False) -> AbstractContextManager:
    """Make parameters that ZeRO-3 divides whole in here, on all processes.
    With `writes` they keep the values of the first process."""
    import deepspeed  # seconds

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if writes else None)


def partitions(zero, rank: int, writes: bool = False) -> Iterator[Partition]:
    """Yield the shares that this process steps, as a DeepSpeed optimizer divides them.

    A share on NVMe is in memory until the next one is asked for. `writes` says whether
    they are changed, which reaches the model under ZeRO-3 alone.
    """
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        yield from _of_zero_3(zero, rank, writes)
    else:
        yield from _of_zero_1_and_2(zero, rank)


def _of_zero_1_and_2(zero, rank: int) -> Iterator[Partition]:
    """Yield one for every parameter group: its parameters lie end to end, and every
    process has an equal part. (`_hp_mapping` ignores "round_robin_gradients".)"""
    if hasattr(zero, "single_partition_of_fp32_groups"):
        stepped, groups = zero.single_partition_of_fp32_groups, zero.round_robin_bit16_groups
        offsets = zero.round_robin_bit16_offsets
    else:  # ZeRO-1 in bf16 with fp32 gradients is a class with other names
        stepped, groups = zero.fp32_groups_flat_partition, zero.bf16_groups
        offsets = [accumulate((p.numel() for p in group[:-1]), initial=0) for group in groups]
    for index, (fp32, group, firsts) in enumerate(zip(stepped, groups, offsets, strict=True)):
        here = rank * fp32.numel()
        parts = []
        for parameter, first in zip(group, firsts, strict=True):
            last = first + parameter.numel() - 1
            split = first // fp32.numel() != last // fp32.numel()
            start = max(first, here)
            end = max(start, min(last + 1, here + fp32.numel()))  # start, if nothing is held
            inside, at = slice(start - first, end - first), slice(start - here, end - here)
            parts.append(Part(parameter, inside, at, end - start, split))
        yield Partition(fp32, parts, index)


def _of_zero_3(zero, rank: int, writes: bool) -> Iterator[Partition]:
    """Yield one for every "sub_group_size" elements of a group. Every process has an
    equal part of each parameter; the last ones have less or nothing, and a gap.
    What is written reaches the model as in DeepSpeed's own step."""
    if writes:
        zero._partition_all_parameters()  # also one that is whole now
    for index, group in enumerate(zero.fp16_groups):
        on_nvme = zero._swappable_optimizer_subgroup(index)
        if on_nvme:
            zero._optimizer_states_and_gradient_swap_in(index)
        parts, here = [], 0
        for parameter in group:
            share, numel = parameter.partition_numel(), shape_of(parameter).numel()
            start, end = min(rank * share, numel), min((rank + 1) * share, numel)
            at = slice(here, here + end - start)
            parts.append(Part(parameter, slice(start, end), at, end - start, share < numel))
            here += share
        fp32 = zero.fp32_partitioned_groups_flat[index]
        yield Partition(fp32, parts, zero.sub_group_to_group_id[index])
        if writes:
            zero._reassign_or_swap_out_partitioned_parameters(index)
        if on_nvme and writes:
            zero._optimizer_states_and_gradient_swap_out(index)
        elif on_nvme:
            zero._release_swap_buffers(index)
