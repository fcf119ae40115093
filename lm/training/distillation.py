"""Distillation: the teacher, and the loss that compares the student with it.

The teacher is a trained model, whole on every process or divided by ZeRO-3. It is not given to
Accelerate, because a second DeepSpeed plugin would overwrite --accumulation_steps.

The loss is cross-entropy with the text and divergence from the teacher. The divergence compares
softmax(logits / T) of both models, with a temperature T. It is multiplied by T², because its
gradients shrink as 1/T² (Hinton et al., https://arxiv.org/abs/1503.02531). More than CHUNK_LOGITS
logits are divided into chunks; backward computes each chunk again.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.common.errors import UsageError
from lm.data.dataset import TokenStream
from lm.data.tokenizer import tokenizer_hash
from lm.engine.agreement import on_every_process
from lm.engine.deepspeed_config import read_config
from lm.engine.engine import Engine
from lm.engine.zero_inference import inference_config, load_divided
from lm.formats.portable import without_memory
from lm.storage.find import PRETRAINING
from lm.storage.weights import WeightsFolder
from lm.training.arguments import TrainingArguments
from model import Transformer
from model.loss import IGNORE_INDEX
from model.recompute import recomputed

CHUNK_LOGITS = 1 << 25  # logits per chunk: 128 MiB in fp32, 6 times as much with temporary tensors


def require_same_tokenizer(source: WeightsFolder, data: TokenStream) -> None:
    """Raise UsageError if the tokenizers of the model and the data differ. A model without a
    tokenizer file must have the vocabulary size of the data."""
    size = source.config().vocab_size
    same, flag = data.vocab_size == size, "the model's tokenizer"
    if source.tokenizer.is_file():
        same = tokenizer_hash(source.tokenizer) == data.description["tokenizer_sha256"]
        flag = f"--tokenizer {source.tokenizer}"
    if not same or data.vocab_size > size:
        raise UsageError(
            f"{data.folder}, vocabulary {data.vocab_size}, has another tokenizer than the model in "
            f"{source.path}, vocabulary {size}: prepare the {data.kind} anew with {flag}"
        )


@dataclass(frozen=True)
class TeacherWeights:
    """The weights of a teacher, found on the disk but not loaded yet."""

    source: WeightsFolder
    shapes: Transformer  # on the meta device
    zero: dict | None  # configuration of ZeRO-3; None: every process holds the whole teacher

    @classmethod
    def find(cls, args: TrainingArguments) -> "TeacherWeights":
        """Return the teacher that --teacher names. Raises UsageError if it has no
        weights, or if --teacher_config is not for ZeRO-3."""
        source = WeightsFolder.find(args.teacher, Path(args.out_dir), PRETRAINING, foreign=True)
        zero = None
        if path := args.teacher_config:
            config = read_config(path)
            if (stage := config["zero_optimization"].get("stage")) != 3:
                raise UsageError(f"{path}: a teacher is divided by ZeRO stage 3, not {stage!r}")
            # With True, DeepSpeed replaces PyTorch's linear function, for the student too.
            config["zero_optimization"]["memory_efficient_linear"] = False
            zero = inference_config(config, path, args.dtype)
        return cls(source, without_memory(source.config()), zero)

    def load(self, engine: Engine, dtype: str) -> Transformer:
        """Return the teacher on its device, with frozen weights in `dtype`. Every process must call
        this, and the teacher. Raises UsageError if the weights cannot be read."""
        if self.zero:
            model = load_divided(self.zero, self.source)
        else:
            model = on_every_process(engine, self.source.load)
            model.to(engine.accelerator.device, getattr(torch, dtype))
        return model.requires_grad_(False).eval()

    def require_fit(self, data: TokenStream, engine: Engine | None) -> None:
        """Raise UsageError if the teacher cannot read the student's batches, or cannot be divided
        because there is no launcher. `engine` is None before a launch."""
        if self.zero and engine and not torch.distributed.is_initialized():
            raise UsageError("--teacher_config needs a launcher, such as accelerate launch")
        if not self.source.tokenizer.is_file():
            raise UsageError(f"{self.source.path} has no tokenizer to compare with the data's")
        require_same_tokenizer(self.source, data)
        if (most := self.shapes.config.max_seq_len) < data.seq_len:
            limit = f"the teacher reads at most {most} tokens, but the student {data.seq_len}"
            raise UsageError(f"{limit}: pass --max_seq_len {most}")


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
        teacher_logits: the teacher's logits, (B, seq_len, vocab_size or more).
        targets: (B, seq_len) int64; a position with IGNORE_INDEX does not count.
        args: has alpha, temperature and kl: "forward" (KL(teacher || student)) or "reverse".
        vocab_size: the data's vocabulary size; the soft loss ignores logits beyond it.
        compiled: whether to compile the computation, which halves its time.
    """
    size = max(1, CHUNK_LOGITS // logits.shape[-1])
    compute = torch.compile(_sums) if compiled else _sums
    compute = partial(compute, args.temperature, args.kl, vocab_size)
    recompute = "blocks" if targets.numel() > size else "off"
    total = torch.zeros(3, device=logits.device)
    chunks = (
        x.flatten(0, 1).split(size) for x in (logits, targets, teacher_logits[..., :vocab_size])
    )
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
