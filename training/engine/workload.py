"""What one process does in a step, as far as its memory and its traffic depend on it."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from model import LMConfig, Transformer
from model.lora import LoRA, LoRALinear, add_lora
from training.arguments import TrainingArguments
from training.engine.attention_kernel import attention_kernel
from training.engine.kinds import Kind


@dataclass(frozen=True)
class Parameters:
    """What is counted in a model; sizes in elements."""

    total: int
    matrices: int  # trained factors of matrix products: no norms, and no embedding of its own
    block: int  # of one block
    sizes: dict[int, int]  # of a tensor → how many have it
    flops_per_token: int  # of the model, forward and backward
    by_muon: int = 0  # stepped by Muon
    frozen: int = 0
    frozen_norms: bool = False
    inner: int = 0  # between the factors of all adapters, for a token

    @classmethod
    def of(cls, config: LMConfig, muon: bool = False, lora: LoRA | None = None) -> "Parameters":
        """Counted in a model that has shapes and no memory."""
        with torch.device("meta"):
            model = Transformer(config)
            if lora:
                add_lora(model, **vars(lora))
        sizes = [p.numel() for p in model.parameters()]
        layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        factors = {id(p): p for layer in layers for p in layer.parameters() if p.requires_grad}
        in_blocks = [p for p in model.layers.parameters() if p.requires_grad and p.dim() == 2]
        return cls(
            total=sum(sizes),
            matrices=sum(p.numel() for p in factors.values()),
            block=sum(p.numel() for p in model.layers[0].parameters()),
            sizes={size: sizes.count(size) for size in set(sizes)},
            flops_per_token=model.flops_per_token(config.max_seq_len),
            by_muon=sum(p.numel() for p in in_blocks) if muon else 0,
            frozen=sum(p.numel() for p in model.parameters() if not p.requires_grad),
            frozen_norms=not model.norm.weight.requires_grad,
            inner=sum(lora.dim for layer in layers if isinstance(layer, LoRALinear)),
        )

    @property
    def trained(self) -> int:
        return self.total - self.frozen

    def up_to(self, size: int) -> int:
        """Elements of the tensors that are no larger."""
        return sum(each * count for each, count in self.sizes.items() if each <= size)


class Beside(NamedTuple):
    """Another model, which is asked in each step, and never trained."""

    parameters: Parameters
    kind: Kind  # that divides it


@dataclass(frozen=True)
class Workload:
    config: LMConfig
    parameters: Parameters
    dtype: str  # --dtype
    batch_size: int  # sequences of one micro-batch
    accumulation_steps: int
    processes: int
    on_cpu: bool = False  # trained there, and not merely offloaded to it
    keeps_scores: bool = False  # see attention_kernel
    compiled: bool = False
    recompute: str = "off"  # --gradient_checkpointing
    teacher: Beside | None = None  # with whose logits its own are compared

    @classmethod
    def of(
        cls,
        args: TrainingArguments,
        config: LMConfig,
        *,
        processes: int,
        device: torch.device,
        compiled: bool = False,
        lora: LoRA | None = None,
        teacher: Beside | None = None,
    ) -> "Workload":
        """That of a run; asks PyTorch which attention the device has. A GPU that is not here is
        taken to have a fused kernel."""
        keeps_scores = False
        if device.type == "cpu" or torch.cuda.is_available():
            _, keeps_scores = attention_kernel(config, getattr(torch, args.dtype), device)
        return cls(
            config=config,
            parameters=Parameters.of(config, args.optimizer == "muon", lora),
            dtype=args.dtype,
            batch_size=args.batch_size,
            accumulation_steps=args.accumulation_steps,
            processes=processes,
            on_cpu=device.type == "cpu",
            keeps_scores=keeps_scores,
            compiled=compiled,
            recompute=args.gradient_checkpointing,
            teacher=teacher,
        )

    def but(self, **changes) -> "Workload":
        return replace(self, **changes)

    @property
    def half(self) -> int:
        """Bytes of an element in the precision of forward and backward."""
        return 4 if self.dtype == "float32" else 2

    @property
    def plain(self) -> bool:
        """Whether all T × T scores of attention are in memory."""
        return self.keeps_scores or not self.config.use_flash_attn

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.batch_size * self.config.max_seq_len
