import pytest
import torch
from test_compilation import needs_compiler
from test_transformer import some_tokens, transformer
from torch.utils._python_dispatch import TorchDispatchMode

from lm.common.errors import UsageError
from lm.engine.compilation import compile_blocks
from lm.training.arguments import parse_arguments
from model import Transformer

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
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


class Calls(TorchDispatchMode):
    """Count the calls of each operator inside this context."""

    def __init__(self):
        super().__init__()
        self.of: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.of[str(func)] = self.of.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


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
def test_blocks_are_computed_twice_and_selective_keeps_attention(what, silus, attentions):
    model = recomputing(what)
    with Calls() as calls:
        loss_and_gradients(model)
    assert calls.of["aten.silu.default"] == silus * len(model.layers)
    attention = "small_lm.row_block_attention.default"
    assert calls.of[attention] == attentions * len(model.layers)


def test_the_gradient_checkpointing_flag_without_a_value_means_blocks():
    typed = [[], ["--gradient_checkpointing"], ["--gradient_checkpointing", "selective"]]
    found = [parse_arguments(words)[0].gradient_checkpointing for words in typed]
    assert found == ["off", "blocks", "selective"]
    with pytest.raises(UsageError, match="invalid choice: 'True'"):
        parse_arguments(["--gradient_checkpointing", "True"])
