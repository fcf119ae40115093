from types import SimpleNamespace

import pytest
import torch
from test_compilation import needs_compiler
from torch import Tensor
from torch.nn import functional as F

from lm.training import distillation as module
from lm.training.distillation import distillation_loss
from model import IGNORE_INDEX

BATCH, SEQ_LEN, VOCAB = 3, 7, 11
EVERY_KL = pytest.mark.parametrize("kl", ["forward", "reverse"])


def some_logits(seed: int) -> Tensor:
    shape = BATCH, SEQ_LEN, VOCAB
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_targets() -> Tensor:
    """Targets: all ignored in the first sequence, some ignored in the others."""
    targets = torch.randint(VOCAB, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(3))
    targets[0] = IGNORE_INDEX
    targets[1:, ::3] = IGNORE_INDEX
    return targets


def by_hand(
    logits: Tensor, theirs: Tensor, targets: Tensor, alpha: float, temperature: float, kl: str
) -> tuple[Tensor, float, float, float]:
    """Return loss, hard loss, soft loss and agreement, computed one position at a time."""
    hard, soft, same = [], [], []
    for ours, others, target in zip(
        logits.flatten(0, 1), theirs.flatten(0, 1), targets.flatten(), strict=True
    ):
        if target == IGNORE_INDEX:
            continue
        hard.append(-ours.softmax(0)[target].log())
        student, teacher = ((x / temperature).softmax(0) for x in (ours, others))
        p, q = (teacher, student) if kl == "forward" else (student, teacher)
        soft.append(temperature**2 * sum(p[i] * (p[i] / q[i]).log() for i in range(VOCAB)))
        same.append(float(ours.argmax() == others.argmax()))
    hard, soft, agreement = sum(hard) / len(hard), sum(soft) / len(soft), sum(same) / len(same)
    return alpha * hard + (1 - alpha) * soft, hard.item(), soft.item(), agreement


def with_gradient(
    logits: Tensor,
    theirs: Tensor,
    targets: Tensor,
    *,
    alpha: float = 0.3,
    temperature: float = 2,
    kl: str = "forward",
    **settings,
) -> tuple[tuple[Tensor, ...], Tensor]:
    args = SimpleNamespace(alpha=alpha, temperature=temperature, kl=kl)
    logits = logits.clone().requires_grad_()
    found = distillation_loss(logits, theirs, targets, args, **settings)
    found[0].backward()
    return found, logits.grad


@EVERY_KL
@pytest.mark.parametrize("temperature", [1, 2.5])
@pytest.mark.parametrize("alpha", [0, 0.3, 1])
def test_loss_and_gradient_equal_those_of_the_formula(kl, temperature, alpha):
    ours, theirs, targets = some_logits(1), some_logits(1) + some_logits(2), some_targets()
    settings = {"alpha": alpha, "temperature": temperature, "kl": kl}
    found, gradient = with_gradient(ours, theirs, targets, **settings)
    exact = ours.double().requires_grad_()
    loss, *parts = by_hand(exact, theirs.double(), targets, **settings)
    loss.backward()
    assert [x.item() for x in found] == pytest.approx([loss.item(), *parts], rel=1e-5)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert found[0].dtype == torch.float32
    assert not any(x.requires_grad for x in found[1:])
    assert 0 < found[3] < 1


@pytest.mark.parametrize(
    ("kl", "dtype", "tokens", "compiled"),
    [
        ("forward", torch.float32, 1, False),
        ("reverse", torch.bfloat16, 5, False),
        pytest.param("forward", torch.bfloat16, 8, True, marks=needs_compiler),
    ],
)
def test_chunks_give_the_loss_and_gradient_of_one_batch(monkeypatch, kl, dtype, tokens, compiled):
    ours, theirs, targets = some_logits(1).to(dtype), some_logits(2).to(dtype), some_targets()
    whole, expected = with_gradient(ours, theirs, targets, kl=kl)
    monkeypatch.setattr(module, "CHUNK_LOGITS", tokens * VOCAB + 1)  # at most `tokens` per chunk
    chunked, gradient = with_gradient(ours, theirs, targets, kl=kl, compiled=compiled)
    torch.testing.assert_close(chunked, whole)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, expected)


@EVERY_KL
def test_logits_beyond_the_vocabulary_count_in_the_hard_loss_but_not_in_the_soft_loss(kl):
    ours, theirs, targets = some_logits(1), some_logits(2), some_targets()
    without, _ = with_gradient(ours, theirs, targets, kl=kl)
    wider, roomy = (torch.cat([x, some_logits(3)[..., :5] + 9], dim=-1) for x in (ours, theirs))
    found, gradient = with_gradient(wider, roomy, targets, kl=kl, vocab_size=VOCAB)
    hard = F.cross_entropy(wider.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
    torch.testing.assert_close(found[2], without[2])
    torch.testing.assert_close(found[1], hard)
    assert hard > without[1] + 0.01
    assert gradient[targets != IGNORE_INDEX][:, VOCAB:].min() > 0  # training lowers these logits


@EVERY_KL
def test_without_a_target_that_counts_loss_and_gradient_are_zero(kl):
    targets = torch.full((BATCH, SEQ_LEN), IGNORE_INDEX)
    found, gradient = with_gradient(some_logits(1), some_logits(2), targets, kl=kl)
    assert [x.item() for x in found] == [0, 0, 0, 0]
    assert not gradient.any()
