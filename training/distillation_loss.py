"""The loss of distillation: the text gives the next token, the teacher gives probabilities.

Both models' logits are divided by a temperature T before the softmax, and T² makes up for gradients
that shrink as 1/T² (Hinton et al., 2015, https://arxiv.org/abs/1503.02531). Backward computes each
chunk of logits again, so that no fp32 copy of all exists. Compiled it takes half the time.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from model.loss import IGNORE_INDEX
from model.recompute import recomputed

KL = ("forward", "reverse")
CHUNK_LOGITS = 1 << 25  # 128 MB in fp32; with all temporary tensors about six times as much


def distillation_loss(
    logits: Tensor,
    theirs: Tensor,
    targets: Tensor,
    args,
    vocab_size: int | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the student's loss, alpha * hard + (1 - alpha) * soft, and without a gradient its
    parts: hard, the cross-entropy with the targets; soft, T² times the divergence; agreement, the
    share of positions at which both models' likeliest token is the same. They are means over the
    targets that count, in fp32; 0 where none counts.

    Args:
        logits: (B, T, vocab_size or more), the student's, in any precision.
        theirs: (B, T, vocab_size), the teacher's.
        targets: (B, T) int64; IGNORE_INDEX leaves a position out.
        args: with alpha, temperature and kl; "forward" is KL(teacher || student).
        vocab_size: of the text; the student's further outputs, if any, are in the hard loss alone.
    """
    size = max(1, CHUNK_LOGITS // logits.shape[-1])
    compute = torch.compile(_sums) if compiled else _sums
    compute = partial(compute, args.temperature, args.kl, vocab_size)
    what = "blocks" if targets.numel() > size else "off"
    total = torch.zeros(3, device=logits.device)
    chunks = (x.flatten(0, 1).split(size) for x in (logits, targets, theirs))
    for ours, wanted, expected in zip(*chunks, strict=True):
        total = total + recomputed(partial(compute, theirs=expected), what, ours, wanted)
    hard, soft, agreement = total / (targets != IGNORE_INDEX).sum().clamp(min=1)
    loss = args.alpha * hard + (1 - args.alpha) * soft
    return loss, hard.detach(), soft.detach(), agreement.detach()


def _sums(
    temperature: float, kl: str, vocab_size: int, logits: Tensor, targets: Tensor, *, theirs: Tensor
) -> Tensor:
    """Return sums over a chunk: (cross-entropy, T² times the divergence, agreements)."""
    counts = targets != IGNORE_INDEX
    logits = logits.float()  # (tokens, vocab_size or more)
    hard = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    student = logits[:, :vocab_size] / temperature
    teacher = theirs.float() / temperature
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    of, to = (teacher, student) if kl == "forward" else (student, teacher)
    divergence = F.kl_div(to, of, reduction="none", log_target=True).sum(-1)
    soft = temperature**2 * divergence.where(counts, 0).sum()  # a 0 without a gradient
    agreements = ((logits.argmax(-1) == theirs.argmax(-1)) & counts).sum()
    return torch.stack([hard, soft, agreements.float()])
