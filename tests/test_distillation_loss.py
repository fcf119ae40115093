import pytest
import torch
from test_compilation import needs_compiler
from torch import Tensor
from torch.nn import functional as F

from model import IGNORE_INDEX
from training import distillation_loss as module
from training.distillation_loss import KL, Distilled, TopK, distillation_loss

BATCH, SEQ_LEN, VOCAB = 3, 7, 11
EVERY_KL = pytest.mark.parametrize("kl", KL)


def some_logits(seed: int, scale: float = 3) -> Tensor:
    shape = BATCH, SEQ_LEN, VOCAB
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_targets() -> Tensor:
    """The first sequence has none, the others not everywhere."""
    targets = torch.randint(VOCAB, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(3))
    targets[0] = IGNORE_INDEX
    targets[1:, ::3] = IGNORE_INDEX
    return targets


def top_k(logits: Tensor, k: int, temperature: float) -> TopK:
    probabilities, ids = (logits.double() / temperature).softmax(-1).sort(-1, descending=True)
    kept = [probabilities[..., :k]]
    if k < VOCAB:
        kept.append(probabilities[..., k:].sum(-1, keepdim=True))
    return TopK(ids[..., :k], torch.cat(kept, dim=-1).log().float())


def by_hand(
    logits: Tensor, theirs: Tensor, targets: Tensor, alpha: float, temperature: float, kl: str
) -> tuple[Tensor, float, float, float]:
    """Loss, hard, soft and agreement, a position at a time, probability by probability."""
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


def with_gradient(logits: Tensor, theirs, targets: Tensor, **settings) -> tuple[Distilled, Tensor]:
    logits = logits.clone().requires_grad_()
    found = distillation_loss(logits, theirs, targets, **settings)
    found.loss.backward()
    return found, logits.grad


@EVERY_KL
@pytest.mark.parametrize("temperature", [1, 2.5])
@pytest.mark.parametrize("alpha", [0, 0.3, 1])
def test_loss_and_gradient_are_those_of_the_formula(kl, temperature, alpha):
    ours, theirs, targets = some_logits(1), some_logits(1) + some_logits(2), some_targets()
    settings = {"alpha": alpha, "temperature": temperature, "kl": kl}
    found, gradient = with_gradient(ours, theirs, targets, **settings)
    exact = ours.double().requires_grad_()
    loss, *parts = by_hand(exact, theirs.double(), targets, **settings)
    loss.backward()
    assert [x.item() for x in found] == pytest.approx([loss.item(), *parts], rel=1e-5)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert found.loss.dtype == torch.float32
    assert not any(x.requires_grad for x in found[1:])
    assert 0 < found.agreement < 1


@EVERY_KL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 7])
def test_a_chunk_at_a_time_gives_the_same(monkeypatch, kl, dtype, recorded, tokens):
    ours, theirs, targets = some_logits(1).to(dtype), some_logits(2).to(dtype), some_targets()
    theirs = top_k(theirs, 4, 2) if recorded else theirs
    settings = {"alpha": 0.3, "temperature": 2, "kl": kl}
    whole, expected = with_gradient(ours, theirs, targets, **settings)
    monkeypatch.setattr(module, "CHUNK_LOGITS", tokens * VOCAB + 1)
    chunked, gradient = with_gradient(ours, theirs, targets, **settings)
    torch.testing.assert_close(tuple(chunked), tuple(whole))
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, expected)


def test_nothing_as_large_as_all_logits_is_kept_for_backward_but_they_themselves(monkeypatch):
    def kept(chunk: int) -> int:
        monkeypatch.setattr(module, "CHUNK_LOGITS", chunk)
        large = {}

        def keep(x: Tensor) -> Tensor:
            if x.is_floating_point() and x.numel() >= 4 * VOCAB:
                large[x.untyped_storage().data_ptr()] = x
            return x

        ours = some_logits(1).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            distillation_loss(
                ours, some_logits(2), some_targets(), alpha=0.5, temperature=2, kl="forward"
            )
        return len(large)

    assert kept(1 << 20) > 2
    assert kept(4 * VOCAB) == 1  # the student's logits


@needs_compiler
@pytest.mark.parametrize("recorded", [False, True])
def test_compiled_it_is_the_same(monkeypatch, recorded):
    ours, theirs, targets = some_logits(1), some_logits(2), some_targets()
    theirs = top_k(theirs, 4, 2) if recorded else theirs
    settings = {"alpha": 0.3, "temperature": 2, "kl": "forward"}
    expected, gradients = with_gradient(ours, theirs, targets, **settings)
    monkeypatch.setattr(module, "CHUNK_LOGITS", 8 * VOCAB)  # of the last chunk there are 5 tokens
    found, gradient = with_gradient(ours, theirs, targets, **settings, compiled=True)
    torch.testing.assert_close(tuple(found), tuple(expected))
    torch.testing.assert_close(gradient, gradients)


@EVERY_KL
def test_of_the_same_logits_the_divergence_is_nothing_and_everything_agrees(kl):
    ours = some_logits(1)
    settings = {"alpha": 0, "temperature": 3, "kl": kl}
    for theirs in (ours, top_k(ours, 4, 3), top_k(ours, VOCAB, 3)):
        found, gradient = with_gradient(ours, theirs, some_targets(), **settings)
        assert found.soft.item() == pytest.approx(0, abs=1e-5)
        assert found.agreement == 1
        assert gradient.abs().max() < 1e-5


@EVERY_KL
@pytest.mark.parametrize("temperature", [1, 2])
def test_k_of_the_whole_vocabulary_is_all_logits(kl, temperature):
    ours, theirs, targets = some_logits(1), some_logits(2), some_targets()
    settings = {"alpha": 0.3, "temperature": temperature, "kl": kl}
    dense, expected = with_gradient(ours, theirs, targets, **settings)
    recorded = top_k(theirs, VOCAB, temperature)
    found, gradient = with_gradient(ours, recorded, targets, **settings)
    torch.testing.assert_close(tuple(found), tuple(dense))
    torch.testing.assert_close(gradient, expected)


@EVERY_KL
@pytest.mark.parametrize("k", [1, 4, VOCAB - 1])
def test_the_pieces_that_were_not_recorded_are_one_class(kl, k):
    ours, theirs, targets = some_logits(1), some_logits(2), some_targets()
    recorded = top_k(theirs, k, 2)
    settings = {"alpha": 0, "temperature": 2, "kl": kl}
    found, gradient = with_gradient(ours, recorded, targets, **settings)
    exact = ours.double().requires_grad_()
    student = (exact / 2).softmax(-1)
    chosen = student.gather(-1, recorded.ids)
    student = torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], dim=-1)
    teacher = recorded.log_probabilities.double().exp()
    p, q = (teacher, student) if kl == "forward" else (student, teacher)
    expected = 4 * (p * (p / q).log()).sum(-1)[targets != IGNORE_INDEX].mean()
    expected.backward()
    assert found.soft.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-4, atol=1e-6)


@EVERY_KL
@pytest.mark.parametrize("k", [None, 4, VOCAB])
def test_pieces_that_no_text_has_are_known_to_the_hard_loss_alone(kl, k):
    ours, theirs, targets = some_logits(1), some_logits(2), some_targets()
    expected = theirs if k is None else top_k(theirs, k, 2)
    settings = {"alpha": 0.3, "temperature": 2, "kl": kl}
    without = distillation_loss(ours, expected, targets, **settings)
    roomy = torch.cat([ours, some_logits(3)[..., :5]], dim=-1)
    found, gradient = with_gradient(roomy, expected, targets, **settings, vocab_size=VOCAB)
    hard = F.cross_entropy(roomy.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
    torch.testing.assert_close(found.soft, without.soft)
    torch.testing.assert_close(found.hard, hard)
    assert hard > without.hard + 0.01
    assert gradient[targets != IGNORE_INDEX][:, VOCAB:].min() > 0  # away from these


def test_what_is_rounded_to_16_bits_is_a_distribution_again():
    """Else a student that has all of it right would still have a gradient."""
    ours = some_logits(1)
    recorded = top_k(ours, 4, 1)
    rounded = TopK(recorded.ids, (recorded.log_probabilities + 0.1).half())  # 10% too many
    settings = {"alpha": 0, "temperature": 1, "kl": "forward"}
    found, gradient = with_gradient(ours, rounded, some_targets(), **settings)
    assert 0 <= found.soft.item() < 1e-5
    assert gradient.abs().max() < 1e-3


@EVERY_KL
def test_a_remainder_smaller_than_fp32_tells_from_nothing_is_no_infinity(kl):
    ours = some_logits(1)
    ours[..., 0] += 60  # the others have 1e-26 in all
    recorded = top_k(ours, 4, 1)
    settings = {"alpha": 0.5, "temperature": 1, "kl": kl}
    found, gradient = with_gradient(ours, recorded, some_targets(), **settings)
    assert found.soft.item() == pytest.approx(0, abs=1e-5)
    assert gradient.isfinite().all()


@EVERY_KL
@pytest.mark.parametrize("recorded", [False, True])
def test_where_no_target_counts_there_is_no_loss_and_no_gradient(kl, recorded):
    theirs = top_k(some_logits(2), 4, 2) if recorded else some_logits(2)
    targets = torch.full((BATCH, SEQ_LEN), IGNORE_INDEX)
    settings = {"alpha": 0.5, "temperature": 2, "kl": kl}
    found, gradient = with_gradient(some_logits(1), theirs, targets, **settings)
    assert [x.item() for x in found] == [0, 0, 0, 0]
    assert not gradient.any()


def test_positions_without_a_target_change_nothing_whatever_they_hold():
    ours, theirs, targets = some_logits(1), some_logits(2), some_targets()
    settings = {"alpha": 0.5, "temperature": 2, "kl": "forward"}
    expected, _ = with_gradient(ours, theirs, targets, **settings)
    left_out = targets == IGNORE_INDEX
    theirs[left_out] = 100 * some_logits(4)[left_out]
    ours[left_out] = 100 * some_logits(5)[left_out]
    found, gradient = with_gradient(ours, theirs, targets, **settings)
    torch.testing.assert_close(tuple(found), tuple(expected))
    assert not gradient[left_out].any()
