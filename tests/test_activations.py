"""What a forward pass keeps, counted in a real model and not in a formula."""

import pytest
import torch
from torch import nn

from model import LMConfig, Transformer
from model import loss as model_loss
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
    "heads wider than the model": {"head_dim": 24},
}


def small(**changes) -> LMConfig:
    settings = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 112}
    return LMConfig(**settings | {"hidden_dim": 192, "max_seq_len": 96} | changes)


def workload(config: LMConfig, **changes) -> Workload:
    values = {"dtype": "float32", "batch_size": BATCH, "accumulation_steps": 1, "processes": 1}
    return Workload(config, Parameters.of(config), **{"on_cpu": True} | values | changes)


def saved_bytes(config: LMConfig, dtype: torch.dtype, autocast: bool) -> int:
    """Of all tensors that autograd holds when forward ends, but for weights and tables."""
    model = Transformer(config).to(torch.float32 if autocast else dtype)
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


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_of_a_large_vocabulary_no_logits_are_kept(precision, monkeypatch):
    config = small()
    whole = activations(workload(config, dtype=precision))
    monkeypatch.setattr(model_loss, "LARGE_VOCABULARY", 100)
    monkeypatch.setattr(model_loss, "CHUNK_LOGITS", 112 * 96)  # a sequence at a time
    counted = saved_bytes(config, getattr(torch, precision), autocast=False)
    chunked = activations(workload(config, dtype=precision))
    assert chunked.kept == whole.kept == pytest.approx(counted, rel=0.05)
    gradient_of_the_output_layer = (
        config.vocab_size * config.dim * (2 if precision[0] == "b" else 4)
    )
    assert chunked.logits == whole.logits / BATCH + gradient_of_the_output_layer


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
