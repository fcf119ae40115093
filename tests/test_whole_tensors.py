"""Partitions of ZeRO have the right elements of each parameter; what does not fit is refused.
DeepSpeed's layouts are imitated. tests/integration tests weights and moments under every engine,
with adapters, and those of an old run."""

from collections import ChainMap
from types import SimpleNamespace

import pytest
import torch
from conftest import error_of
from torch import nn

from lm.engine.engine import Engine
from lm.engine.whole_tensors import Partition, TrainingState, partitions
from lm.training.arguments import TrainingArguments
from lm.training.optimizer import build_optimizer
from model import LMConfig, Transformer
from model.lora import LoRA, add_lora

SHAPES = [(4, 6), (3, 3), (8, 2), (5,), (7, 1)]


def parameters() -> list[nn.Parameter]:
    """Return parameters whose elements are all different."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    values = torch.arange(float(sum(sizes))).split(sizes)
    return [nn.Parameter(v.view(shape).clone()) for v, shape in zip(values, SHAPES, strict=True)]


def divided(group: list[nn.Parameter], processes: int, gap: int) -> list[Partition]:
    """Divide a group among processes as ZeRO-1 and 2 do; `gap` zeros follow each parameter.
    test_optimizer.py updates such partitions."""
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


def new_state(accelerator, lora_dim: int = 0) -> TrainingState:
    """Return the state of a new model, perhaps with adapters, and of its optimizer."""
    model = Transformer(LMConfig(dim=32, n_layers=2, n_heads=4, vocab_size=64, max_seq_len=16))
    if lora_dim:
        add_lora(model, LoRA(lora_dim, 8.0, "layers", only_lora=True))
    engine = Engine(accelerator, "single process", deepspeed=None)
    optimizer = build_optimizer(model, TrainingArguments(dtype="float32"), engine)
    return TrainingState(engine, *accelerator.prepare(model, optimizer), shapes=model)


def test_weights_and_moments_that_do_not_fit_the_model_are_named(accelerator):
    plain, two, four = (new_state(accelerator, lora_dim) for lora_dim in (0, 2, 4))
    base, moments = plain.weights(), plain.moments()
    others = ChainMap(four.weights(), base)
    said = "lora_a has shape (4, 32), the model needs (2, 32"
    assert said in error_of(two.load_weights, others, "checkpoint")
    assert "lora_a is not in this model" in error_of(plain.load_weights, others, "checkpoint")
    moments["norm.weight.exp_avg"] = moments["norm.weight.exp_avg"][:1]
    line = error_of(plain.load, base, moments, plain.scalars(), "checkpoint")
    assert "the shape of norm.weight.exp_avg is not" in line
