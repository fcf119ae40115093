"""With a large vocabulary, the loss is computed in chunks of tokens: same numbers, less memory."""

import pytest
import torch
from small_model import loss_of_sampled_pieces, opinionated

from model import IGNORE_INDEX, Transformer, loss
from model.sampled_softmax import sample_softmax

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


def test_several_chunks_give_the_loss_and_gradients_of_one(in_chunks):
    model = opinionated(VOCAB, SEQ_LEN)
    whole = loss_and_gradients(model, some_targets())
    in_chunks()
    torch.testing.assert_close(loss_and_gradients(model, some_targets()), whole)


def test_each_position_gets_its_loss_and_hit_and_the_mean_is_over_those_that_count(in_chunks):
    model, tokens, targets = opinionated(VOCAB, SEQ_LEN), some_tokens(), some_targets()
    whole, counts = model(tokens, targets, "none"), targets != IGNORE_INDEX
    logits = model(tokens).logits
    expected = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(whole.loss, expected * counts)
    torch.testing.assert_close(model(tokens, targets).loss, expected[counts].mean())
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


def test_logits_are_computed_in_chunks_whose_size_depends_on_the_device(in_chunks, monkeypatch):
    in_chunks(16)
    monkeypatch.setattr(loss, "GPU_CHUNK_LOGITS", 32 * VOCAB)
    model, rows = opinionated(VOCAB, SEQ_LEN), []
    model.output.register_forward_hook(lambda layer, x, logits: rows.append(len(logits)))
    model(some_tokens(), some_targets()).loss.backward()
    assert rows[:4] == [16, 16, 16, 15]
    assert sorted(rows[4:]) == [15, 16, 16, 16]
    rows.clear()
    x = torch.zeros(BATCH, SEQ_LEN, model.config.dim, device="meta")  # stands for a GPU
    with torch.no_grad():  # as in validation
        model(some_tokens(), some_targets())
        model.to("meta").next_token_loss(model.output, x, some_targets().to("meta"), "mean")
    assert rows == [16, 16, 16, 15, 32, 31]


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
    torch.testing.assert_close(loss_and_gradients(model, targets), (expected.detach(), by_hand))


def test_a_sampled_loss_needs_no_chunks_while_rows_of_its_logits_are_short(in_chunks, monkeypatch):
    """A small chunk would have few targets, and backward would compute its logits again."""
    in_chunks(5)
    monkeypatch.setattr(loss, "LARGE_VOCABULARY", 30)
    model, rows = opinionated(VOCAB, SEQ_LEN), []
    sample_softmax(model.train(), PARTS)
    model.output.register_forward_hook(lambda layer, x, out: rows.append(len(out[0])))
    model(some_tokens()[:1, :15], some_targets()[1:2, :15])
    assert rows == [15]  # the whole micro-batch: at most 15 targets and 45 / 4 other pieces


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
