"""The learning rate, parameter groups, and Muon: its formula, and its updates of partitions."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DummyOptim
from test_whole_tensors import divided
from torch import nn

from lm.engine.engine import Engine
from lm.training import optimizer as module
from lm.training.arguments import TrainingArguments
from lm.training.optimizer import (
    NEWTON_SCHULZ,
    Muon,
    build_optimizer,
    parameter_groups,
)
from model import LMConfig, Transformer

ARGS = TrainingArguments(learning_rate=3e-4, weight_decay=0.2, beta1=0.8, beta2=0.9)
MUON = dataclasses.replace(ARGS, optimizer="muon", muon_learning_rate=0.03, muon_momentum=0.7)
SHAPES = [(16, 16), (32, 16), (16, 32), (16, 16), (8, 32), (3, 16, 8), (32, 16)]
LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95


def tiny(**settings) -> Transformer:
    return Transformer(LMConfig(dim=32, n_layers=2, n_heads=4, vocab_size=64, **settings))


def build(model: Transformer, args: TrainingArguments = ARGS, deepspeed: dict | None = None):
    engine = Engine(SimpleNamespace(process_index=0), "any engine", deepspeed)
    return build_optimizer(model, args, engine)


def names_in(model: Transformer, groups: list[dict]) -> list[set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [{names[id(p)] for p in group["params"]} for group in groups]


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_matrices_but_not_norms_decay_and_muon_updates_the_matrices_of_blocks(tie_embeddings):
    model = tiny(tie_embeddings=tie_embeddings, qk_norm=True)
    names = {name for name, _ in model.named_parameters()}
    norms = {name for name in names if "norm" in name}
    assert len(norms) == 2 * 4 + 1
    groups = parameter_groups(model, 0.1)
    assert names_in(model, groups) == [names - norms, norms]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert len(parameter_groups(torch.nn.Linear(4, 4, bias=False), 0.1)) == 1  # no empty group
    optimizer = build(model, MUON, deepspeed={"optimizer": {"type": "AdamW"}})
    blocks = {name for name in names - norms if name.startswith("layers.")}
    assert len(blocks) == 2 * 7
    assert names_in(model, optimizer.param_groups) == [blocks, names - norms - blocks, norms]


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_the_embedding_and_an_untied_output_layer_have_learning_rates_of_their_own(tie_embeddings):
    model = tiny(tie_embeddings=tie_embeddings)
    args = dataclasses.replace(MUON, embedding_lr_factor=3.0, output_lr_factor=0.5)
    groups = build(model, args).param_groups
    factors = [group["lr_factor"] for group in groups]
    found = dict(zip(factors, names_in(model, groups), strict=True))
    assert found[3.0] == {"tok_embeddings.weight"}
    assert found.get(0.5) == (None if tie_embeddings else {"output.weight"})
    assert all("norm" in name for name in found[1.0])


def test_adamw_is_from_torch_unless_the_deepspeed_file_has_an_optimizer():
    optimizer = build(tiny(), deepspeed={"zero_optimization": {"stage": 2}})
    assert type(optimizer) is torch.optim.AdamW
    for group, decay in zip(optimizer.param_groups, (0.2, 0.0), strict=True):
        found = group["lr"], group["betas"], group["eps"], group["weight_decay"]
        assert found == (3e-4, (0.8, 0.9), 1e-8, decay)
    optimizer = build(tiny(), deepspeed={"optimizer": {"type": "AdamW"}})
    assert isinstance(optimizer, DummyOptim)
    assert (optimizer.lr, optimizer.weight_decay) == (3e-4, 0.2)
    assert [group["weight_decay"] for group in optimizer.params] == [0.2, 0.0]


def test_the_flags_set_the_group_of_muon_and_the_groups_of_adamw():
    by_muon, *by_adamw = build(tiny(), MUON).param_groups
    assert [by_muon[k] for k in ("momentum", "weight_decay", "lr_factor")] == [0.7, 0.2, 100]
    found = [(group["betas"], group["eps"], group["weight_decay"]) for group in by_adamw]
    assert found == [((0.8, 0.9), 1e-8, 0.2), ((0.8, 0.9), 1e-8, 0.0)]


@pytest.mark.parametrize(
    ("has_bf16", "dtype", "used"),
    [
        (None, "bfloat16", torch.bfloat16),  # None: no GPU
        (False, "float16", torch.float32),
        (True, "float16", torch.bfloat16),
        (True, "float32", torch.float32),
    ],
)
def test_muon_uses_fp32_for_dtype_float32_or_a_gpu_without_bf16(monkeypatch, has_bf16, dtype, used):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_bf16 is not None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert build(tiny(), dataclasses.replace(MUON, dtype=dtype)).dtype == used


def matrices(shapes=SHAPES, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator) * 0.1) for shape in shapes]


def group_of(parameters: list, **changes) -> dict:
    settings = {"algorithm": "muon", "lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM}
    return {"params": parameters, "equal_rows": True, **settings, **changes}


def muon_of(parameters: list, dtype=torch.float32, **changes) -> Muon:
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


@pytest.mark.parametrize("at_once", [1, 600, 2**20])  # elements; 600 hold two of 16 × 16
def test_muon_in_fp32_equals_its_formula(monkeypatch, at_once):
    monkeypatch.setitem(module.BATCH_ELEMENTS, "cpu", at_once)
    mine, by_hand = matrices(), [p.detach().double() for p in matrices()]
    train(muon_of(mine), mine)
    momenta = [torch.zeros_like(p) for p in by_hand]
    for step in range(4):
        for p, momentum, gradient in zip(by_hand, momenta, gradients(step), strict=True):
            momentum += (1 - MOMENTUM) * (gradient.double() - momentum)
            update = (1 - MOMENTUM) * gradient.double() + MOMENTUM * momentum
            norms = update.norm(dim=(-2, -1), keepdim=True)  # (3, 16, 8): 3 experts, one norm each
            u, sigma, v = torch.linalg.svd(update / norms, full_matrices=False)
            for a, b, c in NEWTON_SCHULZ:
                sigma = a * sigma + b * sigma**3 + c * sigma**5
            update = (u * sigma[..., None, :]) @ v
            rows, cols = p.shape[-2:]
            norms = update.norm(dim=-1 if rows >= cols else -2, keepdim=True)
            total = update.norm(dim=(-2, -1), keepdim=True)
            update *= total / norms / max(rows, cols) ** 0.5
            p *= 1 - LR * DECAY
            p -= LR * max(1, rows / cols) ** 0.5 * update
    assert largest_difference(mine, by_hand) < 1e-6


def test_the_other_groups_of_muon_equal_adamw_to_the_bit():
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
def test_muon_updates_partitions_like_whole_matrices(processes, gap, monkeypatch):
    """Each process is a thread. With 7 processes, three of them share one matrix."""
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
    train(muon_of(whole), whole)
    shares = divided(parameters, processes, gap)
    by_step = [
        divided([nn.Parameter(g) for g in gradients(step)], processes, gap) for step in range(4)
    ]

    def work(rank: int) -> None:
        partition = shares[rank]
        optimizer = muon_of(matrices())
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


def test_a_zero_gradient_only_decays_weights_and_a_skipped_step_changes_nothing():
    (p,) = parameters = matrices([(8, 8)])
    before, optimizer = p.detach().clone(), muon_of(parameters)
    for found_inf, factor in ((1, 1.0), (0, 1 - LR * DECAY)):
        optimizer.found_inf = torch.tensor(found_inf)  # GradScaler sets it: 1 skips the step
        p.grad = torch.full((8, 8), float(found_inf))
        optimizer.step()
        torch.testing.assert_close(p, before * factor, rtol=1e-6, atol=0)
        assert bool(optimizer.state) == (not found_inf)
