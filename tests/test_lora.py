"""LoRA adapters: which layers have adapters, which weights are trained, what merging gives."""

import math
from dataclasses import replace

import pytest
import torch
from small_model import adapted, opinionated

from lm.inference.decoder import Decoder
from model import ConfigError, LMConfig, Transformer
from model.lora import LoRA, add_lora, is_adapter, merged_weights

LAYERS = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
LAYERS += ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
SMALL = LoRA(dim=4, alpha=6.0, module_name="layers", only_lora=True)
TOKENS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


def test_adapters_are_initialised_as_in_peft():
    model = add_lora(Transformer(LMConfig(dim=512, n_layers=1)), replace(SMALL, dim=8, alpha=8))
    wq = model.layers[0].attention.wq
    assert not wq.lora_b.any()
    assert 0.95 / math.sqrt(512) < wq.lora_a.abs().max() <= 1 / math.sqrt(512)


@pytest.mark.parametrize(
    ("module_name", "expected"),
    [
        ("layers", {f"layers.{i}.{layer}" for i in (0, 1) for layer in LAYERS}),
        ("attention.wq", {"layers.0.attention.wq", "layers.1.attention.wq"}),
        ("layers.1.feed", {f"layers.1.{layer}" for layer in LAYERS[4:]}),
    ],
)
def test_layers_are_chosen_by_a_part_of_their_names(module_name, expected):
    names = dict(adapted(module_name=module_name).named_parameters())
    assert {name[:-7] for name in names if name.endswith(".lora_a")} == expected
    assert {f"{name}.weight" for name in expected} <= names.keys()


def test_experts_are_frozen_and_only_attention_has_adapters():
    with torch.device("meta"):
        model = Transformer(LMConfig(dim=32, n_layers=2, n_heads=4, use_moe=True))
        add_lora(model, replace(SMALL, only_lora=False))
    adapters = {name for name, _ in model.named_parameters() if name.endswith(".lora_a")}
    assert {name.split(".")[2] for name in adapters} == {"attention"}
    assert len(adapters) == 2 * 4
    feed_forward = [p for name, p in model.named_parameters() if "feed_forward" in name]
    assert not any(p.requires_grad for p in feed_forward)


def test_only_trained_weights_have_gradients():
    for only_lora in (True, False):
        model = adapted(only_lora)
        model(TOKENS[:, :-1], TOKENS[:, 1:]).loss.backward()
        have = {name for name, p in model.named_parameters() if p.grad is not None}
        others = {n for n, p in model.named_parameters() if "norm" in n or "embed" in n}
        adapters = {n for n, _ in model.named_parameters() if is_adapter(n)}
        assert have == (adapters if only_lora else adapters | others)


def test_merged_weights_give_a_plain_model_the_logits_of_the_adapted_model():
    model = adapted()
    plain = opinionated(vocab_size=50, seq_len=16)
    merged = merged_weights(dict(model.named_parameters()), model.lora)
    assert list(merged) == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict(dict(merged), strict=False)
    torch.testing.assert_close(plain(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert merged_weights(merged, None) is merged


def test_the_decoder_uses_the_adapters():
    model = adapted()
    _, logits = Decoder(model).read([TOKENS[0].tolist()])
    torch.testing.assert_close(logits[0], model(TOKENS[:1]).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_flops_per_token_count_no_gradient_of_a_frozen_weight():
    model = opinionated(50, 16)
    whole, n = model.flops_per_token(16), model.num_parameters()
    attention = whole - 6 * n
    add_lora(model, SMALL)
    adapters = model.num_parameters() - n
    assert model.flops_per_token(16) == 4 * n + 6 * adapters + attention


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"module_name": "decoder.layers."}, "no layer.s name: layers.0.a"),
        ({"module_name": "output"}, "the output layer too, which shares"),
        ({"dim": 0}, "lora_dim must be from 1 to dim .32., not 0"),
        ({"dim": 33}, "not 33"),
    ],
)
def test_invalid_settings_are_refused_in_one_line_and_change_nothing(choices, message):
    model = opinionated(50, 16)
    with pytest.raises(ConfigError, match=message) as refused:
        add_lora(model, replace(SMALL, **choices))
    assert "\n" not in str(refused.value)
    assert model.lora is None
    assert all(p.requires_grad for p in model.parameters())
