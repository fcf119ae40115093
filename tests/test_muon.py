"""Muon against torch.optim.Muon, and partitions of ZeRO against whole matrices."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_partition import divided
from torch import nn

from training import optimizer as module
from training.optimizer import NEWTON_SCHULZ, Muon

SHAPES = [(16, 16), (32, 16), (16, 32), (16, 16), (8, 32), (32, 16)]
LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95


def matrices(shapes=SHAPES, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator) * 0.1) for shape in shapes]


def group_of(parameters: list, **changes) -> dict:
    settings = {"algorithm": "muon", "lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM}
    return {"params": parameters, **settings, **changes}


def ours(parameters: list, dtype=torch.float32, **changes) -> Muon:
    return Muon([group_of(parameters, **changes)], LR, dtype)


def gradients(step: int, shapes=SHAPES) -> list[torch.Tensor]:
    return [p.detach() for p in matrices(shapes, seed=100 + step)]


def train(optimizer, parameters: list, steps: int = 4, shapes=SHAPES) -> None:
    for step in range(steps):
        for p, gradient in zip(parameters, gradients(step, shapes), strict=True):
            p.grad = gradient
        optimizer.step()


def largest_difference(a: list, b: list) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("at_once", [1, 600, 2**20])  # elements: 16 × 16 twice is 512
def test_in_fp32_it_is_the_formula(monkeypatch, at_once):
    monkeypatch.setitem(module.BATCH_ELEMENTS, "cpu", at_once)
    mine, by_hand = matrices(), [p.detach().double() for p in matrices()]
    train(ours(mine), mine)
    momenta = [torch.zeros_like(p) for p in by_hand]
    for step in range(4):
        for p, momentum, gradient in zip(by_hand, momenta, gradients(step), strict=True):
            momentum += (1 - MOMENTUM) * (gradient.double() - momentum)
            update = (1 - MOMENTUM) * gradient.double() + MOMENTUM * momentum
            u, sigma, v = torch.linalg.svd(update / update.norm(), full_matrices=False)
            for a, b, c in NEWTON_SCHULZ:
                sigma = a * sigma + b * sigma**3 + c * sigma**5
            longer = max(1, p.shape[0] / p.shape[1]) ** 0.5
            p *= 1 - LR * DECAY
            p -= LR * longer * (u * sigma) @ v
    assert largest_difference(mine, by_hand) < 1e-6


def test_the_other_groups_are_adamws_to_the_bit():
    shapes = [(5, 7), (7,), (3, 4)]
    mine, theirs = matrices(shapes), matrices(shapes)
    settings = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-8}
    decays = (0.3, 0.0)

    def groups(parameters):
        shared = zip((parameters[:2], parameters[2:]), decays, strict=True)
        return [{"params": p, "weight_decay": d, **settings} for p, d in shared]

    optimizer = Muon([group_of(matrices()), *groups(mine)], LR, torch.float32)
    adamw = torch.optim.AdamW(groups(theirs), fused=True)
    train(optimizer, mine, shapes=shapes)
    train(adamw, theirs, shapes=shapes)
    assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(("processes", "gap"), [(1, 0), (2, 3), (7, 3)])
def test_partitions_are_stepped_as_whole_matrices_are(processes, gap, monkeypatch):
    """Every process is a thread; with 7 of them, matrices are split among three."""
    given, barrier = [], threading.Barrier(processes, timeout=60)

    def all_reduce(tensor: torch.Tensor) -> None:
        given.append(tensor.clone())
        barrier.wait()
        tensor.copy_(torch.stack(given).sum(0))
        if barrier.wait() == 0:
            given.clear()
        barrier.wait()

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    whole, parameters = matrices(), matrices()
    train(ours(whole), whole)
    shares = divided(parameters, processes, gap)
    by_step = [
        divided([nn.Parameter(g) for g in gradients(step)], processes, gap) for step in range(4)
    ]

    def work(rank: int) -> None:
        partition = shares[rank]
        optimizer = ours(matrices())
        optimizer.param_groups[0]["params"] = [partition.fp32]  # as DeepSpeed does
        optimizer.layout[partition.fp32] = partition
        for step in range(4):
            partition.fp32.grad = by_step[step][rank].fp32.clone()
            optimizer.step()

    with ThreadPoolExecutor(processes) as threads:
        list(threads.map(work, range(processes)))
    for i, p in enumerate(whole):
        result = torch.empty(p.numel())
        for partition in shares:
            part = partition.parts[i]
            result[part.in_parameter] = partition.fp32[part.in_partition]
        assert largest_difference([result.view_as(p)], [p]) < 1e-6


def test_zeros_only_decay_and_a_step_that_is_left_out_changes_nothing():
    (p,) = parameters = matrices([(8, 8)])
    before, optimizer = p.detach().clone(), ours(parameters)
    for found_inf, factor in ((1, 1.0), (0, 1 - LR * DECAY)):  # as a GradScaler tells AdamW
        optimizer.found_inf = torch.tensor(found_inf)
        p.grad = torch.full((8, 8), float(found_inf))
        optimizer.step()
        torch.testing.assert_close(p, before * factor, rtol=1e-6, atol=0)
        assert bool(optimizer.state) == (not found_inf)
