"""With a large vocabulary, the loss is computed in chunks of tokens: same numbers, less memory."""

import pytest
import torch
from small_model import opinionated

from model import IGNORE_INDEX, Transformer, loss

VOCAB, SEQ_LEN, BATCH = 60, 21, 3


def some_targets() -> torch.Tensor:
    """63 targets: 3 chunks of 16, one of 15. In sequence 0 all are ignored, in the others some."""
    targets = torch.randint(VOCAB, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(3))
    targets[0] = IGNORE_INDEX
    targets[1:, ::4] = IGNORE_INDEX
    return targets


def some_tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def in_chunks(monkeypatch):
    def switch(tokens: int = 16) -> None:
        monkeypatch.setattr(loss, "LARGE_VOCABULARY", VOCAB - 1)
        monkeypatch.setattr(loss, "CHUNK_LOGITS", tokens * VOCAB)

    return switch


def loss_and_gradients(model: Transformer, targets: torch.Tensor):
    model.zero_grad()
    out = model(some_tokens(), targets)
    assert out.logits is None
    out.loss.backward()
    return out.loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_several_chunks_give_the_loss_and_gradients_of_one(in_chunks, dtype):
    model = opinionated(VOCAB, SEQ_LEN).to(dtype)
    whole, expected = loss_and_gradients(model, some_targets())
    in_chunks()
    chunked, gradients = loss_and_gradients(model, some_targets())
    torch.testing.assert_close(chunked, whole)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


@pytest.mark.parametrize("reduction", ["none", "hits"])
def test_each_position_gets_its_own_loss_without_reduction(in_chunks, reduction):
    model, tokens, targets = opinionated(VOCAB, SEQ_LEN), some_tokens(), some_targets()
    whole = model(tokens, targets, reduction)
    logits = model(tokens).logits
    expected = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(whole.loss, expected * (targets != IGNORE_INDEX))
    in_chunks()
    chunked = model(tokens, targets, reduction)
    torch.testing.assert_close(chunked.loss, whole.loss)
    if reduction == "hits":
        hits = logits.argmax(-1) == targets
        assert 0 < hits.sum() < hits.numel()
        assert torch.equal(whole.hits, hits)
        assert torch.equal(chunked.hits, hits)
    else:
        assert whole.hits is chunked.hits is None


def test_without_a_target_that_counts_the_gradient_is_zero(in_chunks):
    in_chunks()
    model = opinionated(VOCAB, SEQ_LEN)
    out = model(some_tokens(), torch.full((BATCH, SEQ_LEN), IGNORE_INDEX))
    assert out.loss.isnan()  # the mean over no target
    (out.loss.nan_to_num() * 0.0).backward()  # as in training/run.py
    assert all(not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("recompute", [True, False], ids=["training", "validation"])
def test_logits_are_computed_one_chunk_at_a_time(in_chunks, recompute):
    in_chunks(16)
    model = opinionated(VOCAB, SEQ_LEN)
    rows = []
    model.output.register_forward_hook(lambda layer, x, logits: rows.append(logits.shape[0]))
    with torch.set_grad_enabled(recompute):
        out = model(some_tokens(), some_targets())
    assert rows == [16, 16, 16, 15]
    if recompute:
        out.loss.backward()
        assert sorted(rows[4:]) == [15, 16, 16, 16]


@pytest.mark.parametrize(
    ("vocab_size", "tokens", "on_cpu", "on_gpu"),
    [
        (6_400, 1 << 20, 1 << 20, 1 << 20),
        (32_768, 1 << 20, 1 << 20, 1 << 20),  # up to this vocab_size there is always one chunk
        (49_152, 512, 512, 512),
        (49_152, 4_096, 683, 4_096),  # on a CPU 6 chunks, the last a little smaller
        (128_256, 4_096, 256, 2_048),
        (128_256, 24 * 1_024, 262, 2_048),  # 94 chunks and 12 chunks
    ],
)
def test_tokens_form_equal_chunks_if_vocab_size_is_above_32768(vocab_size, tokens, on_cpu, on_gpu):
    for device, at_once in (("cpu", on_cpu), ("cuda", on_gpu)):
        assert loss.tokens_at_once(vocab_size, tokens, torch.device(device)) == at_once


def test_the_device_of_the_model_decides_the_size_of_a_chunk(in_chunks, monkeypatch):
    in_chunks()
    monkeypatch.setattr(loss, "GPU_CHUNK_LOGITS", 32 * VOCAB)
    rows = []
    model = opinionated(VOCAB, SEQ_LEN)
    model.output.register_forward_hook(lambda layer, x, logits: rows.append(logits.shape[0]))
    for device in ("cpu", "meta"):  # meta stands for a GPU
        x = torch.zeros(BATCH, SEQ_LEN, model.config.dim, device=device)
        with torch.no_grad():
            model.to(device)._loss(x, some_targets().to(device), "mean")
    assert rows == [16, 16, 16, 15, 32, 31]
