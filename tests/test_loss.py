"""With a large vocabulary, the loss is computed in chunks of tokens: same numbers, less memory."""

import pytest
import torch
from small_model import loss_of_sampled_pieces, opinionated

from model import IGNORE_INDEX, Transformer, loss
from model.sampled_softmax import SampledOutput, sample_softmax

VOCAB, SEQ_LEN, BATCH = 60, 21, 3
PARTS = 4  # of 63 tokens and 60 pieces


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


def test_each_position_gets_its_own_loss_and_hit_without_reduction(in_chunks):
    model, tokens, targets = opinionated(VOCAB, SEQ_LEN), some_tokens(), some_targets()
    whole = model(tokens, targets, "none")
    logits = model(tokens).logits
    expected = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(whole.loss, expected * (targets != IGNORE_INDEX))
    in_chunks()
    chunked = model(tokens, targets, "none")
    torch.testing.assert_close(chunked.loss, whole.loss)
    hits = logits.argmax(-1) == targets
    assert 0 < hits.sum() < hits.numel()
    assert torch.equal(whole.hits, hits)
    assert torch.equal(chunked.hits, hits)


def test_without_a_target_that_counts_the_gradient_is_zero(in_chunks):
    in_chunks()
    model = opinionated(VOCAB, SEQ_LEN)
    out = model(some_tokens(), torch.full((BATCH, SEQ_LEN), IGNORE_INDEX))
    assert out.loss.isnan()  # the mean over no target
    (out.loss.nan_to_num() * 0.0).backward()  # as in lm/training/run.py
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
            model.to(device)
            model.next_token_loss(model.output, x, some_targets().to(device), "mean")
    assert rows == [16, 16, 16, 15, 32, 31]


@pytest.mark.parametrize("size", [63, 13])
def test_a_sampled_loss_has_the_gradients_of_a_loss_by_hand(in_chunks, size):
    model, targets = opinionated(VOCAB, SEQ_LEN), some_targets()
    logits = model(some_tokens()).logits.flatten(0, 1)
    chunks = list(zip(logits.split(size), targets.flatten().split(size), strict=True))
    counted = [(t != IGNORE_INDEX).sum() for _, t in chunks]
    losses = [
        loss_of_sampled_pieces(*chunk, PARTS) * n
        for chunk, n in zip(chunks, counted, strict=True)
        if n
    ]
    expected = sum(losses) / sum(counted)
    expected.backward()
    by_hand = {name: p.grad.clone() for name, p in model.named_parameters()}
    if size < 63:
        in_chunks(size)
    sample_softmax(model.train(), PARTS)
    sampled, gradients = loss_and_gradients(model, targets)
    torch.testing.assert_close(sampled, expected.detach())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, by_hand[name], msg=name)


def test_a_sampled_loss_needs_no_chunks_while_rows_of_its_logits_are_short(in_chunks, monkeypatch):
    """A small chunk would have few targets, and backward would compute its logits again."""
    in_chunks(5)
    monkeypatch.setattr(loss, "LARGE_VOCABULARY", 30)
    model, rows = opinionated(VOCAB, SEQ_LEN), []
    sample_softmax(model.train(), PARTS)
    model.output.register_forward_hook(lambda layer, x, out: rows.append(len(out[0])))
    model(some_tokens()[:1, :15], some_targets()[1:2, :15])
    assert rows == [15]  # the whole micro-batch: at most 15 targets and 45 / 4 other pieces


def test_each_part_of_the_tokens_has_another_share_of_the_other_pieces():
    """On average over the parts, the denominator of the softmax is that of the vocabulary."""
    targets = some_targets().clamp(max=19)
    layer = SampledOutput(torch.nn.Linear(8, VOCAB, bias=False).double(), PARTS)
    x = torch.randn(1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    logits, places = layer(x.expand(63, 8), targets.flatten())
    sums = logits.exp().sum(1)
    assert sums[:PARTS].std() > 0.01
    torch.testing.assert_close(sums[:PARTS].mean(), layer(x)[0].exp().sum())
    assert torch.equal(sums[PARTS:], sums[:-PARTS])
    counted = targets.flatten() != IGNORE_INDEX
    of_targets = layer(x)[0, targets.flatten()[counted]]
    torch.testing.assert_close(logits[counted].gather(1, places[counted, None])[:, 0], of_targets)
    assert (places[~counted] == IGNORE_INDEX).all()
    # With the same pieces as targets and another sum, each part has another share.
    targets.view(-1)[int((targets.flatten() == 19).nonzero()[0])] = 16
    others = layer(x.expand(63, 8), targets.flatten())[0].exp().sum(1)
    torch.testing.assert_close(others[:PARTS], sums[:PARTS].roll(3))  # 19 - 16


def test_without_other_pieces_the_sampled_loss_is_that_of_the_vocabulary():
    model = opinionated(VOCAB, SEQ_LEN)
    targets = (torch.arange(BATCH * SEQ_LEN) % (VOCAB - 2)).view(BATCH, SEQ_LEN)
    whole = model(some_tokens(), targets).loss
    sample_softmax(model.train(), PARTS)
    torch.testing.assert_close(model(some_tokens(), targets).loss, whole)


def test_validation_compares_with_the_whole_vocabulary():
    model, targets = opinionated(VOCAB, SEQ_LEN), some_targets()
    whole = model(some_tokens(), targets).loss
    sample_softmax(model, PARTS)
    assert not torch.isclose(model.train()(some_tokens(), targets).loss, whole)
    assert torch.equal(model.eval()(some_tokens(), targets).loss, whole)
