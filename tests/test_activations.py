"""What a forward pass keeps, counted in a real model and not in a formula."""

import pytest
import torch
from torch import nn

from model import LMConfig, Transformer
from model.lora import LoRA, add_lora, is_adapter
from training.engine.activations import activations
from training.engine.workload import Parameters, Workload

BATCH = 3
SHAPES = {
    "grouped heads": {},
    "as many key heads": {"n_kv_heads": 4},
    "plain attention": {"use_flash_attn": False},
    "wide feed-forward": {"hidden_dim": 448},
    "output layer of its own": {"tie_embeddings": False},
    "longer than a block of rows": {"max_seq_len": 160},
    "deeper": {"n_layers": 5},
}


def small(**changes) -> LMConfig:
    settings = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 112}
    return LMConfig(**settings | {"hidden_dim": 192, "max_seq_len": 96} | changes)


def workload(config: LMConfig, **changes) -> Workload:
    values = {"dtype": "float32", "batch_size": BATCH, "accumulation_steps": 1, "processes": 1}
    values |= {"parameters": Parameters.of(config), "on_cpu": True}
    return Workload(config, **values | changes)


def saved_bytes(
    config: LMConfig, dtype: torch.dtype, autocast: bool, lora: LoRA | None = None
) -> int:
    """Of all tensors that autograd holds when forward ends, but for weights and tables."""
    model = Transformer(config)
    if lora:
        add_lora(model, **vars(lora))
    for p in model.parameters():
        p.data = p.data.to(torch.float32 if autocast and p.requires_grad else dtype)
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    found = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that none moves in
        return tensor

    tokens = torch.randint(config.vocab_size, (BATCH, config.max_seq_len))
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(tokens, tokens.clone()).loss
    assert loss.requires_grad
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_what_a_model_keeps_is_what_is_expected(changes, precision):
    config, autocast = small(**changes), precision == "autocast"
    dtype = "float32" if precision == "float32" else "bfloat16"
    counted = saved_bytes(config, getattr(torch, dtype), autocast)
    work = workload(config, dtype=dtype)
    # The log-probabilities are a third of what the logits are at most.
    expected = activations(work, autocast=autocast)
    assert expected.kept + expected.logits / 3 == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("only_lora", [True, False])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_with_adapters_it_is_what_is_expected_too(precision, only_lora):
    config, autocast = small(n_layers=6), precision == "autocast"
    dtype = "float32" if precision == "float32" else "bfloat16"
    lora = LoRA(8, 16.0, "layers", only_lora)
    counted = saved_bytes(config, getattr(torch, dtype), autocast, lora)
    work = workload(config, dtype=dtype, parameters=Parameters.of(config, lora=lora))
    expected = activations(work, autocast=autocast)
    # Below the first adapter nothing has a gradient, so that the first norm keeps nothing.
    assert expected.kept + expected.logits / 3 == pytest.approx(counted, rel=0.04)


def test_of_recomputed_blocks_the_input_is_kept_and_one_block_at_a_time():
    config = small(n_layers=6)
    work = workload(config, dtype="bfloat16")
    all_of_it, less = activations(work), activations(work.but(recompute="blocks"))
    deeper = workload(small(n_layers=7), dtype="bfloat16", recompute="blocks")
    inputs = BATCH * 96 * 64 * 2
    assert activations(deeper).kept - less.kept == inputs
    assert activations(deeper).block == less.block
    one = activations(workload(small(n_layers=7), dtype="bfloat16")).kept - all_of_it.kept
    assert less.block == all_of_it.block + one
    assert less.logits == all_of_it.logits
    assert less.kept == all_of_it.kept - 6 * (one - inputs)


def test_attention_that_is_kept_lies_between_all_and_nothing():
    work = workload(small())
    kept = [activations(work.but(recompute=what)).kept for what in ("blocks", "selective", "off")]
    assert kept == sorted(kept)
    assert len(set(kept)) == 3


def test_activations_grow_with_the_batch():
    work = workload(small())
    one, eight = (activations(work.but(batch_size=size)) for size in (1, 8))
    assert (eight.kept, eight.logits, eight.block) == tuple(
        8 * each for each in (one.kept, one.logits, one.block)
    )


def test_kernels_that_take_no_shared_heads_repeat_them():
    on_gpu = [workload(small(), dtype=dtype, on_cpu=False) for dtype in ("bfloat16", "float16")]
    shared, repeated = (activations(work).kept for work in on_gpu)
    # keys and values of 2 heads become 4, each of 16 channels, in 16 bits and 2 layers
    assert repeated - shared == BATCH * 96 * 2 * (2 * 2 * 16) * 2


def test_parameters_are_counted_in_a_model():
    config = small(tie_embeddings=False)
    model, counted = Transformer(config), Parameters.of(config, muon=True)
    assert counted.total == model.num_parameters()
    assert counted.flops_per_token == model.flops_per_token(config.max_seq_len)
    assert counted.block == sum(p.numel() for p in model.layers[0].parameters())
    assert counted.by_muon == 2 * sum(
        m.weight.numel() for m in model.layers[0].modules() if isinstance(m, nn.Linear)
    )
    norms = (2 * 2 + 1) * 64
    assert counted.up_to(64) == norms
    assert counted.up_to(10**9) == counted.total
    assert counted.matrices == counted.total - norms - model.tok_embeddings.weight.numel()
    tied = Parameters.of(small())
    assert tied.matrices == tied.total - norms


@pytest.mark.parametrize("only_lora", [True, False])
def test_with_adapters_what_is_trained_is_counted_apart(only_lora):
    config, lora = small(), LoRA(4, 8.0, "layers", only_lora)
    model, counted = Transformer(config), Parameters.of(config, muon=True, lora=lora)
    add_lora(model, **vars(lora))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert counted.trained == counted.total - counted.frozen == sum(p.numel() for p in trained)
    assert counted.by_muon == sum(p.numel() for n, p in model.named_parameters() if is_adapter(n))
    embedding = 0 if only_lora else model.output.weight.numel()
    assert counted.matrices == counted.by_muon + embedding
    assert counted.flops_per_token == model.flops_per_token(config.max_seq_len)
