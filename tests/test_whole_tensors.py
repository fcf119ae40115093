"""The training state of a single process, and DeepSpeed's loss scale. tests/integration tests the
state under DDP and DeepSpeed."""

import dataclasses
import json
from collections import ChainMap
from types import SimpleNamespace

import pytest
import torch

from lm.engine.engine import Engine
from lm.engine.whole_tensors import TrainingState
from lm.training.arguments import TrainingArguments
from lm.training.optimizer import build_optimizer
from model import LMConfig, Transformer
from model.config import ConfigError
from model.lora import LoRA, add_lora

ADAMW = TrainingArguments(dtype="float32", learning_rate=1e-2)
MUON = dataclasses.replace(ADAMW, optimizer="muon")
CONFIG = LMConfig(dim=32, n_layers=2, n_heads=4, vocab_size=64, max_seq_len=16)


class Trainee:
    """A model, its optimizer, and the state of both."""

    def __init__(self, accelerator, args: TrainingArguments, seed: int = 0, lora=None):
        torch.manual_seed(seed)
        model = Transformer(CONFIG)
        if lora:
            add_lora(model, lora)
        engine = Engine(accelerator, "single process", deepspeed=None)
        optimizer = build_optimizer(model, args, engine)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.state = TrainingState(engine, self.model, self.optimizer, shapes=model)

    def step(self, seed: int) -> None:
        tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(seed))
        self.model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("lora", [None, *(LoRA(4, 8.0, "layers", only) for only in (True, False))])
@pytest.mark.parametrize("args", [ADAMW, MUON])
def test_the_state_has_only_trained_weights_and_continues_to_the_bit(args, lora, accelerator):
    base = Trainee(accelerator, ADAMW, seed=7).state.weights()
    one = Trainee(accelerator, args, lora=lora)
    one.state.load_weights(base, "base")
    begun = dict(one.model.named_parameters())
    assert all(torch.equal(begun[name], weight) for name, weight in base.items())
    rows = False if args is MUON else None  # a rule of Muon that a new run does not have
    if args is MUON:
        one.state.optimizer.param_groups[0]["equal_rows"] = rows
    for seed in (1, 2):
        one.step(seed)
    weights, moments, scalars = one.state.weights(), one.state.moments(), one.state.scalars()
    trained = {name for name, p in one.model.named_parameters() if p.requires_grad}
    assert weights.keys() == trained
    assert {name.rpartition(".")[0] for name in moments} == trained
    by_muon_alone = args is MUON and lora is not None and lora.only_lora
    steps = 0 if by_muon_alone else 2  # of AdamW
    assert scalars == {"optimizer_step": steps, "loss_scale": None, "equal_rows": rows}
    other = Trainee(accelerator, args, seed=5, lora=lora)
    other.state.load(ChainMap(weights, base), moments, scalars, "checkpoint")
    for seed in (3, 4):
        one.step(seed)
        other.step(seed)
    for name, p in one.model.named_parameters():
        assert torch.equal(p, dict(other.model.named_parameters())[name])
        assert p.requires_grad or torch.equal(p, base[name])
    moments = one.state.moments()
    assert all(torch.equal(moments[name], moment) for name, moment in other.state.moments().items())
    assert other.state.scalars()["optimizer_step"] == 2 * steps


def test_adapters_that_do_not_fit_the_model_are_named(accelerator):
    base = Trainee(accelerator, ADAMW).state.weights()
    lora = LoRA(4, 8.0, "layers", only_lora=True)
    four = Trainee(accelerator, ADAMW, lora=lora)
    two = Trainee(accelerator, ADAMW, lora=dataclasses.replace(lora, dim=2))
    with pytest.raises(ConfigError, match=r"lora_a has shape \(4, 32\), the model needs \(2, 32"):
        two.state.load_weights(ChainMap(four.state.weights(), base), "checkpoint")
    with pytest.raises(ConfigError, match=r"wk.lora_a is not in this model"):
        Trainee(accelerator, ADAMW).state.load_weights(four.state.weights() | base, "checkpoint")


@pytest.mark.parametrize("stepped", [False, True])
def test_the_moments_of_a_parameter_depend_on_its_optimizer(stepped, accelerator):
    trainee = Trainee(accelerator, MUON)
    if stepped:
        trainee.step(1)
    expected = set()
    for name, p in trainee.model.named_parameters():
        by_muon = p.dim() == 2 and name != "tok_embeddings.weight"
        kept = ("momentum_buffer",) if by_muon else ("exp_avg", "exp_avg_sq")
        expected |= {f"{name}.{key}" for key in kept}
    moments = trainee.state.moments()
    assert moments.keys() == expected
    assert any(bool(moment.any()) for moment in moments.values()) == stepped
    assert trainee.state.scalars()["optimizer_step"] == stepped
    name = "layers.0.attention.wq.weight.momentum_buffer"
    moments[name] = moments[name][:1]  # a wrong shape
    with pytest.raises(ConfigError, match=name):
        trainee.state.load(trainee.state.weights(), moments, trainee.state.scalars(), "checkpoint")


def test_the_loss_scale_of_fp16_is_restored():
    """DeepSpeed's scaler is used. A scale that was lowered stays lowered."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    def state(scaler) -> TrainingState:
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.AdamW([parameter])
        parameter.grad = torch.ones(3)
        optimizer.step()
        zero = SimpleNamespace(optimizer=optimizer, loss_scaler=scaler, bit16_groups=[])
        zero.single_partition_of_fp32_groups = []
        zero.round_robin_bit16_groups = zero.round_robin_bit16_offsets = []
        accelerator = SimpleNamespace(mixed_precision="fp16", process_index=0)
        engine = Engine(accelerator, "DeepSpeed ZeRO-2", {"zero_optimization": {"stage": 2}})
        model = SimpleNamespace(optimizer=zero, module=torch.nn.Module())
        return TrainingState(engine, model, None, None)

    options = {"init_scale": 2.0**16, "scale_window": 1000, "min_scale": 1.0, "delayed_shift": 1}
    options["consecutive_hysteresis"] = False
    used, fresh = (CreateLossScaler(torch.float16, 0, True, options) for _ in range(2))
    used.cur_scale, used.cur_iter, used.last_overflow_iter = 128.0, 70, 69
    saved = json.loads(json.dumps(state(used).scalars()))
    target = state(fresh)
    target.model.config = SimpleNamespace(tie_embeddings=False)
    target.load({}, {}, saved, "checkpoint")
    assert (fresh.cur_scale, fresh.cur_iter, fresh.last_overflow_iter) == (128.0, 70, 69)
    assert saved["optimizer_step"] == 1
