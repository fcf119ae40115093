"""Find the fp32 weights of each parameter when DeepSpeed ZeRO divides them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Part(NamedTuple):
    """The elements of one parameter that this process holds, possibly none."""

    parameter: nn.Parameter
    in_parameter: slice  # place of these elements in the flattened parameter
    in_partition: slice  # place of these elements in this process's partition
    split: bool  # whether the parameter lies on more than one process


class Partition(NamedTuple):
    """Weights of one parameter group that the optimizer of this process updates."""

    fp32: Tensor  # (numel,)
    parts: list[Part]  # one for each parameter, in the same order on every process
    group: int  # index in the optimizer's `param_groups`


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of the whole parameter; under ZeRO-3 `parameter.shape` may be (0,)."""
    return getattr(parameter, "ds_shape", parameter.shape)


def gathered(*parameters: nn.Parameter, writes: bool = False) -> AbstractContextManager:
    """Return a context in which the parameters are whole. Every process must enter the context.
    With `writes`, all processes get the values that rank 0 wrote in the context."""
    import deepspeed  # importing it takes seconds

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if writes else None)


def partitions(zero, rank: int, writes: bool = False) -> Iterator[Partition]:
    """Yield the partitions that this process updates. `zero` is DeepSpeed's optimizer. A partition
    on NVMe is in memory until the next partition is requested. Set `writes` to change partitions:
    under ZeRO-3 the new values are copied to the model, under ZeRO-1 and 2 they are not."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        yield from _of_zero_3(zero, rank, writes)
    else:
        yield from _of_zero_1_and_2(zero, rank)


def _of_zero_1_and_2(zero, rank: int) -> Iterator[Partition]:
    """Yield one partition for each parameter group.
    The flat parameters of a group form one long vector, and every process has an equal part of it.
    DeepSpeed's own table, `_hp_mapping`, is wrong with "round_robin_gradients"."""
    if hasattr(zero, "single_partition_of_fp32_groups"):
        partitions_fp32 = zero.single_partition_of_fp32_groups
        groups = zero.round_robin_bit16_groups
        offsets = zero.round_robin_bit16_offsets
    else:  # BF16_Optimizer (ZeRO-1 in bf16 with fp32 gradients) has other names
        partitions_fp32 = zero.fp32_groups_flat_partition
        groups = zero.bf16_groups
        offsets = [accumulate((p.numel() for p in group[:-1]), initial=0) for group in groups]
    layout = zip(partitions_fp32, groups, offsets, strict=True)
    for index, (fp32, group, group_offsets) in enumerate(layout):
        size = fp32.numel()  # the same on every process
        here = rank * size  # where this process's partition begins in the vector
        parts = []
        for parameter, first in zip(group, group_offsets, strict=True):
            behind = first + parameter.numel()
            start = max(first, here)
            end = max(start, min(behind, here + size))  # equals start if no element is here
            in_parameter = slice(start - first, end - first)
            in_partition = slice(start - here, end - here)
            split = first // size != (behind - 1) // size
            parts.append(Part(parameter, in_parameter, in_partition, split))
        yield Partition(fp32, parts, index)


def _of_zero_3(zero, rank: int, writes: bool) -> Iterator[Partition]:
    """Yield one partition for each of DeepSpeed's sub-groups, which ends after about
    "sub_group_size" elements. All shares of a parameter are equally large, some with padding."""
    if writes:
        zero._partition_all_parameters()  # some parameters may be gathered now
    for index, group in enumerate(zero.fp16_groups):
        on_nvme = zero._swappable_optimizer_subgroup(index)
        if on_nvme:
            zero._optimizer_states_and_gradient_swap_in(index)
        parts = []
        here = 0  # where the share of the next parameter begins in the partition
        for parameter in group:
            share = parameter.partition_numel()  # with padding
            numel = shape_of(parameter).numel()
            start = min(rank * share, numel)
            held = min(share, numel - start)  # without padding
            in_parameter = slice(start, start + held)
            in_partition = slice(here, here + held)
            parts.append(Part(parameter, in_parameter, in_partition, share < numel))
            here += share
        fp32 = zero.fp32_partitioned_groups_flat[index]
        yield Partition(fp32, parts, zero.sub_group_to_group_id[index])
        if writes:  # copy the values to the model, as DeepSpeed's own step does
            zero._reassign_or_swap_out_partitioned_parameters(index)
        if on_nvme and writes:
            zero._optimizer_states_and_gradient_swap_out(index)
        elif on_nvme:
            zero._release_swap_buffers(index)
