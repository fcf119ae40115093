"""The loss of distillation: cross-entropy with the text and divergence from the teacher.

The divergence compares softmax(logits / T) of both models, with a temperature T. It is multiplied
by T², because its gradients shrink as 1/T² (Hinton et al., https://arxiv.org/abs/1503.02531).
More than CHUNK_LOGITS logits are divided into chunks; backward computes each chunk again.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from model.loss import IGNORE_INDEX
from model.recompute import recomputed

CHUNK_LOGITS = 1 << 25  # logits per chunk: 128 MiB in fp32, 6 times as much with temporary tensors


def distillation_loss(
    logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    args,
    vocab_size: int | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (loss, hard, soft, agreement), fp32 means over the targets that count (0 if none).
    `loss` = alpha * hard + (1 - alpha) * soft; only `loss` has a gradient. `hard` is cross-entropy,
    `soft` T² times the divergence, `agreement` the share of targets where both argmaxes agree.

    Args:
        logits: the student's logits, (B, seq_len, vocab_size or more), in any precision.
        teacher_logits: (B, seq_len, vocab_size).
        targets: (B, seq_len) int64; a position with IGNORE_INDEX does not count.
        args: has alpha, temperature and kl: "forward" (KL(teacher || student)) or "reverse".
        vocab_size: the data's vocabulary size; the soft loss ignores student logits beyond it.
        compiled: whether to compile the computation, which halves its time.
    """
    size = max(1, CHUNK_LOGITS // logits.shape[-1])
    compute = torch.compile(_sums) if compiled else _sums
    compute = partial(compute, args.temperature, args.kl, vocab_size)
    recompute = "blocks" if targets.numel() > size else "off"
    total = torch.zeros(3, device=logits.device)
    chunks = (x.flatten(0, 1).split(size) for x in (logits, targets, teacher_logits))
    for student, target, teacher in zip(*chunks, strict=True):
        total = total + recomputed(partial(compute, theirs=teacher), recompute, student, target)
    hard, soft, agreement = total / (targets != IGNORE_INDEX).sum().clamp(min=1)
    loss = args.alpha * hard + (1 - args.alpha) * soft
    return loss, hard.detach(), soft.detach(), agreement.detach()


def _sums(
    temperature: float, kl: str, vocab_size: int, logits: Tensor, targets: Tensor, *, theirs: Tensor
) -> Tensor:
    """Return sums (cross-entropy, T² times divergence, agreements); `theirs`: teacher logits."""
    counts = targets != IGNORE_INDEX  # (tokens,)
    logits = logits.float()  # (tokens, vocab_size or more)
    hard = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    student = (logits[:, :vocab_size] / temperature).log_softmax(-1)
    teacher = (theirs.float() / temperature).log_softmax(-1)
    p, q = (teacher, student) if kl == "forward" else (student, teacher)
    divergence = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)  # KL(p || q)
    soft = temperature**2 * divergence.where(counts, 0).sum()  # ignored positions: no gradient
    agreements = ((logits.argmax(-1) == theirs.argmax(-1)) & counts).sum()
    return torch.stack([hard, soft, agreements.float()])
