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


def tiny(**settings) -> Transformer:
    return Transformer(LMConfig(dim=32, n_layers=2, n_heads=4, vocab_size=64, **settings))


def engine_of(deepspeed: dict | None) -> Engine:
    """As far as an optimizer is concerned."""
    return Engine(SimpleNamespace(process_index=0), "any engine", deepspeed)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_every_parameter_is_in_exactly_one_group(tie_embeddings):
    model = tiny(tie_embeddings=tie_embeddings)
    grouped = [id(p) for group in parameter_groups(model, 0.1) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_matrices_decay_and_norms_do_not():
    model = tiny()
    names = {id(p): name for name, p in model.named_parameters()}
    decay, no_decay = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    assert all("norm" in names[id(p)] for p in no_decay["params"])
    assert not any("norm" in names[id(p)] for p in decay["params"])
    assert "tok_embeddings.weight" in {names[id(p)] for p in decay["params"]}


def test_frozen_parameters_are_left_out():
    model = tiny()
    model.tok_embeddings.weight.requires_grad_(False)
    grouped = [id(p) for group in parameter_groups(model, 0.1) for p in group["params"]]
    assert id(model.tok_embeddings.weight) not in grouped


def test_no_group_is_empty():
    groups = parameter_groups(torch.nn.Linear(4, 4, bias=False), 0.1)
    assert len(groups) == 1


@pytest.mark.parametrize("deepspeed", [None, {"zero_optimization": {"stage": 2}}])
def test_the_script_makes_adamw_where_the_deepspeed_file_holds_none(deepspeed):
    optimizer = build_optimizer(tiny(), ARGS, engine_of(deepspeed))
    assert type(optimizer) is torch.optim.AdamW
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.9), 1e-8)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]


def test_the_groups_reach_an_optimizer_of_the_deepspeed_file():
    model = tiny()
    optimizer = build_optimizer(model, ARGS, engine_of({"optimizer": {"type": "AdamW"}}))
    assert isinstance(optimizer, DummyOptim)
    assert (optimizer.lr, optimizer.weight_decay) == (3e-4, 0.2)
    assert [group["weight_decay"] for group in optimizer.params] == [0.2, 0.0]


MUON = dataclasses.replace(ARGS, optimizer="muon", muon_learning_rate=0.03, muon_momentum=0.7)


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("deepspeed", [None, {"optimizer": {"type": "AdamW"}}])
def test_muon_steps_the_matrices_of_the_blocks_and_nothing_else(tie_embeddings, deepspeed):
    model = tiny(tie_embeddings=tie_embeddings)
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, MUON, engine_of(deepspeed))
    by_muon, decay, no_decay = (
        {names[id(p)] for p in group["params"]} for group in optimizer.param_groups
    )
    assert len(by_muon) == 2 * 7
    assert all(name.startswith("layers.") and "norm" not in name for name in by_muon)
    assert decay == {"tok_embeddings.weight"} | (set() if tie_embeddings else {"output.weight"})
    assert all("norm" in name for name in no_decay)
    assert sorted(by_muon | decay | no_decay) == sorted(names.values())


def test_the_flags_reach_both_parts_of_muon():
    optimizer = build_optimizer(tiny(), MUON, engine_of(None))
    by_muon, *by_adamw = optimizer.param_groups
    assert (by_muon["momentum"], by_muon["weight_decay"]) == (0.7, 0.2)
    for group in by_adamw:
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.9), 1e-8)
    assert [group["weight_decay"] for group in by_adamw] == [0.2, 0.0]


@pytest.mark.parametrize(
    ("dtype", "by"),
    [("bfloat16", torch.bfloat16), ("float16", torch.bfloat16), ("float32", torch.float32)],
)
def test_muon_orthogonalises_in_half_precision_unless_training_is_in_full(dtype, by):
    args = dataclasses.replace(MUON, dtype=dtype)
    assert build_optimizer(tiny(), args, engine_of(None)).dtype == by


@pytest.mark.parametrize(
    ("has_bf16", "dtype", "by"),
    [
        (False, "float16", torch.float32),
        (False, "float32", torch.float32),
        (True, "float16", torch.bfloat16),
        (True, "float32", torch.float32),
    ],
)
def test_a_gpu_without_bf16_orthogonalises_in_fp32(monkeypatch, has_bf16, dtype, by):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    args = dataclasses.replace(MUON, dtype=dtype)
    assert build_optimizer(tiny(), args, engine_of(None)).dtype == by


def test_frozen_matrices_are_left_out_of_muon():
    model = tiny()
    model.layers[0].attention.wq.weight.requires_grad_(False)
    optimizer = build_optimizer(model, MUON, engine_of(None))
    assert len(optimizer.param_groups[0]["params"]) == 2 * 7 - 1


def test_muons_learning_rate_has_a_peak_of_its_own_and_the_same_shape():
    optimizer = build_optimizer(tiny(), MUON, engine_of(None))
    for share in (1.0, 0.1):
        set_learning_rate(optimizer, share * 3e-4)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [pytest.approx(share * 0.03), share * 3e-4, share * 3e-4]


def test_the_learning_rate_reaches_every_group():
    optimizer = build_optimizer(tiny(), ARGS, engine_of(None))
    set_learning_rate(optimizer, 7e-5)
    assert [group["lr"] for group in optimizer.param_groups] == [7e-5, 7e-5]
