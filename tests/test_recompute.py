from unittest.mock import Mock

import pytest
import torch
from test_arguments import parse_arguments
from test_compilation import needs_compiler
from test_transformer import some_tokens, transformer
from torch.nn import functional as F

from lm.common.errors import UsageError
from lm.engine.compilation import compile_blocks
from model import Transformer, cpu_attention

WAYS = pytest.mark.parametrize("what", ["blocks", "selective"])


def recomputing(what: str, compiled: bool = False, **changes) -> Transformer:
    model = transformer(**changes).train()
    for block in model.layers:
        block.recompute = what
    if compiled:
        compile_blocks(model)
    return model


def loss_and_gradients(model: Transformer) -> list[torch.Tensor]:
    """Return the loss, the gradients and the next random number."""
    tokens = some_tokens(38)
    torch.manual_seed(5)
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), torch.rand(1)]


def assert_same_bits(what: str, **settings) -> None:
    ours, theirs = (loss_and_gradients(recomputing(way, **settings)) for way in (what, "off"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@WAYS
@pytest.mark.parametrize(
    "settings", [{}, {"use_flash_attn": False}, {"dropout": 0.3, "use_moe": True}]
)
def test_recomputation_changes_no_bit_of_losses_gradients_and_random_numbers(what, settings):
    assert_same_bits(what, **settings)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(what, **settings)


@needs_compiler
def test_selective_recomputation_of_compiled_blocks_changes_no_bit():
    assert_same_bits("selective", compiled=True)


@pytest.mark.parametrize(
    ("what", "silus", "attentions"), [("off", 1, 1), ("blocks", 2, 2), ("selective", 2, 1)]
)
def test_blocks_are_computed_twice_and_selective_keeps_attention(
    what, silus, attentions, monkeypatch
):
    silu, attend = Mock(wraps=F.silu), Mock(wraps=cpu_attention._new_flat_weights)
    monkeypatch.setattr(F, "silu", silu)
    monkeypatch.setattr(cpu_attention, "_new_flat_weights", attend)  # each forward calls it once
    model = recomputing(what)
    loss_and_gradients(model)
    assert silu.call_count == silus * len(model.layers)
    assert attend.call_count == attentions * len(model.layers)


def test_the_gradient_checkpointing_flag_without_a_value_means_blocks():
    typed = [[], ["--gradient_checkpointing"], ["--gradient_checkpointing", "selective"]]
    found = [parse_arguments(words)[0].gradient_checkpointing for words in typed]
    assert found == ["off", "blocks", "selective"]
    with pytest.raises(UsageError, match="invalid choice: 'True'"):
        parse_arguments(["--gradient_checkpointing", "True"])
