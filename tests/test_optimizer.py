import dataclasses
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DummyOptim

from model import LMConfig, Transformer
from training.arguments import TrainingArguments
from training.engine.launch import Engine
from training.optimizer import build_optimizer, parameter_groups, set_learning_rate

ARGS = TrainingArguments(learning_rate=3e-4, weight_decay=0.2, beta1=0.8, beta2=0.9)
MUON = dataclasses.replace(ARGS, optimizer="muon", muon_learning_rate=0.03, muon_momentum=0.7)


def tiny(**settings) -> Transformer:
    return Transformer(LMConfig(dim=32, n_layers=2, n_heads=4, vocab_size=64, **settings))


def build(model: Transformer, args: TrainingArguments = ARGS, deepspeed: dict | None = None):
    engine = Engine(SimpleNamespace(process_index=0), "any engine", deepspeed)
    return build_optimizer(model, args, engine)


def names_in(model: Transformer, groups: list[dict]) -> list[set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [{names[id(p)] for p in group["params"]} for group in groups]


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_matrices_decay_and_norms_do_not(tie_embeddings):
    model = tiny(tie_embeddings=tie_embeddings)
    groups = parameter_groups(model, 0.1)
    decay, no_decay = names_in(model, groups)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all("norm" in name for name in no_decay)
    assert not any("norm" in name for name in decay)
    assert sorted([*decay, *no_decay]) == sorted(name for name, _ in model.named_parameters())
    assert len(parameter_groups(torch.nn.Linear(4, 4, bias=False), 0.1)) == 1  # none is empty


@pytest.mark.parametrize("deepspeed", [None, {"zero_optimization": {"stage": 2}}])
def test_the_script_makes_adamw_where_the_deepspeed_file_holds_none(deepspeed):
    optimizer = build(tiny(), deepspeed=deepspeed)
    assert type(optimizer) is torch.optim.AdamW
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.9), 1e-8)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    set_learning_rate(optimizer, 7e-5)
    assert [group["lr"] for group in optimizer.param_groups] == [7e-5, 7e-5]


def test_the_groups_reach_an_optimizer_of_the_deepspeed_file():
    optimizer = build(tiny(), deepspeed={"optimizer": {"type": "AdamW"}})
    assert isinstance(optimizer, DummyOptim)
    assert (optimizer.lr, optimizer.weight_decay) == (3e-4, 0.2)
    assert [group["weight_decay"] for group in optimizer.params] == [0.2, 0.0]


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_muon_steps_the_matrices_of_the_blocks_and_nothing_else(tie_embeddings):
    model = tiny(tie_embeddings=tie_embeddings)
    optimizer = build(model, MUON, deepspeed={"optimizer": {"type": "AdamW"}})
    by_muon, decay, no_decay = names_in(model, optimizer.param_groups)
    assert len(by_muon) == 2 * 7
    assert all(name.startswith("layers.") and "norm" not in name for name in by_muon)
    assert decay == {"tok_embeddings.weight"} | (set() if tie_embeddings else {"output.weight"})
    assert all("norm" in name for name in no_decay)
    assert len(no_decay) == 2 * 2 + 1


def test_the_flags_reach_both_parts_of_muon():
    optimizer = build(tiny(), MUON)
    by_muon, *by_adamw = optimizer.param_groups
    assert (by_muon["momentum"], by_muon["weight_decay"]) == (0.7, 0.2)
    for group in by_adamw:
        assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-8)
    assert [group["weight_decay"] for group in by_adamw] == [0.2, 0.0]
    for share in (1.0, 0.1):  # a peak of its own, and the same schedule
        set_learning_rate(optimizer, share * 3e-4)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [pytest.approx(share * 0.03), share * 3e-4, share * 3e-4]


@pytest.mark.parametrize(
    ("has_bf16", "dtype", "by"),
    [
        (None, "bfloat16", torch.bfloat16),  # None: no GPU
        (None, "float32", torch.float32),
        (False, "float16", torch.float32),
        (True, "float16", torch.bfloat16),
        (True, "float32", torch.float32),
    ],
)
def test_muon_orthogonalises_in_bf16_where_it_can(monkeypatch, has_bf16, dtype, by):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_bf16 is not None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert build(tiny(), dataclasses.replace(MUON, dtype=dtype)).dtype == by
