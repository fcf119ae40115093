"""A ZeRO partition has the right elements of each parameter. DeepSpeed's layouts are imitated."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lm.engine.whole_tensors import Partition, partitions

SHAPES = [(4, 6), (3, 3), (8, 2), (5,), (7, 1)]


def parameters(shapes=SHAPES) -> list[nn.Parameter]:
    """Return parameters whose elements are all different."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    values = torch.arange(float(sum(sizes))).split(sizes)
    return [nn.Parameter(v.view(shape).clone()) for v, shape in zip(values, shapes, strict=True)]


def divided(group: list[nn.Parameter], processes: int, gap: int = 0) -> list[Partition]:
    """Divide a group among processes as DeepSpeed does; `gap` zeros follow each parameter."""
    line, offsets = [], []
    for p in group:
        offsets.append(sum(map(len, line)))
        line += [p.detach().flatten(), torch.zeros(gap)]
    line = torch.cat(line)
    line = torch.cat([line, torch.zeros(-len(line) % (2 * processes))])
    zero = {"round_robin_bit16_groups": [group], "round_robin_bit16_offsets": [offsets]}
    return [
        next(partitions(SimpleNamespace(single_partition_of_fp32_groups=[mine], **zero), rank))
        for rank, mine in enumerate(line.chunk(processes))
    ]


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("gap", [0, 3])
def test_the_parts_of_all_processes_make_whole_parameters(processes, gap):
    group = parameters()
    shares = divided(group, processes, gap)
    for i, p in enumerate(group):
        whole = torch.full((p.numel(),), -1.0)
        for partition in shares:
            part = partition.parts[i]
            assert part.parameter is p
            assert (whole[part.in_parameter] == -1).all()
            whole[part.in_parameter] = partition.fp32[part.in_partition]
        assert torch.equal(whole.view_as(p), p)
        held = [partition.fp32[partition.parts[i].in_partition] for partition in shares]
        holders = sum(len(elements) > 0 for elements in held)
        assert {partition.parts[i].split for partition in shares} == {holders > 1}


class Zero3:
    """Imitates DeepSpeed's ZeRO-3 optimizer: divides a group into two sub-groups. `calls` records
    the calls of methods that this class does not define."""

    def __init__(self, group: list[nn.Parameter], processes: int, rank: int, nvme: bool = False):
        self.fp16_groups = group[:2], group[2:]
        self.sub_group_to_group_id = {0: 4, 1: 4}
        self.nvme, self.calls = nvme, []
        self.fp32_partitioned_groups_flat = []
        for sub_group in self.fp16_groups:
            shares = []
            for p in sub_group:
                p.ds_shape, whole = p.shape, p.detach().flatten()
                padded = torch.cat([whole, torch.full((-len(whole) % processes,), -2.0)])
                mine = padded.chunk(processes)[rank]
                p.partition_numel = mine.numel
                shares.append(mine)
                p.data = torch.empty(0)
            self.fp32_partitioned_groups_flat.append(torch.cat(shares))

    def _swappable_optimizer_subgroup(self, index: int) -> bool:
        return self.nvme

    def __getattr__(self, name: str):
        return lambda *index: self.calls.append((name, *index))


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 8, 50])
def test_the_parts_of_all_processes_make_whole_parameters_under_zero_3(processes):
    wholes = [torch.full((p.numel(),), -1.0) for p in parameters()]
    for rank in range(processes):
        group = parameters()
        zero, parts = Zero3(group, processes, rank), []
        for partition in partitions(zero, rank):
            assert partition.group == 4
            parts += [(part, partition.fp32[part.in_partition]) for part in partition.parts]
        for whole, p, (part, held) in zip(wholes, group, parts, strict=True):
            assert part.parameter is p
            assert part.split == (processes > 1)
            assert (whole[part.in_parameter] == -1).all()
            whole[part.in_parameter] = held
        assert zero.calls == []
    for whole, p in zip(wholes, parameters(), strict=True):
        assert torch.equal(whole.view_as(p), p)


def test_a_written_sub_group_reaches_the_model_and_nvme_before_the_next_is_read():
    zero = Zero3(parameters(), 2, 0, nvme=True)
    for index, _ in enumerate(partitions(zero, 0, writes=True)):
        zero.calls.append(("written", index))
    steps = ("_optimizer_states_and_gradient_swap_in", "written")
    steps += ("_reassign_or_swap_out_partitioned_parameters",)
    steps += ("_optimizer_states_and_gradient_swap_out",)
    by_index = [(step, index) for index in (0, 1) for step in steps]
    assert zero.calls == [("_partition_all_parameters",), *by_index]
    zero.calls.clear()
    assert len(list(partitions(zero, 0))) == 2  # buffers that are only read are released
    steps = ("_optimizer_states_and_gradient_swap_in", "_release_swap_buffers")
    assert zero.calls == [(step, index) for index in (0, 1) for step in steps]
