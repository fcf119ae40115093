"""The optimizers, AdamW and Muon.

Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/) replaces the running average of a
matrix's gradients (its momentum) by an approximation of the nearest orthogonal matrix.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from lm.engine.deepspeed_config import ADAM_EPS
from lm.engine.engine import Engine
from lm.engine.hardware import has_bf16
from lm.engine.whole_tensors import Partition, partitions, shape_of, state_of
from lm.training.arguments import TrainingArguments

# Coefficients (a, b, c) of each iteration of `orthogonalize`. Five iterations move every singular
# value between 0.0015 and 1 into the interval from 0.68 to 1.20.
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
# Matrix elements to orthogonalise at once: they fit into a CPU's caches, or keep a GPU busy.
BATCH_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    without: Sequence[nn.Parameter] = (),
    lr_factors: Mapping[nn.Parameter, float] = MappingProxyType({}),
) -> list[dict]:
    """Return groups of trained parameters not in `without`: matrices with weight decay, and scales
    of norms, which should stay near 1, without. `lr_factors` are multiples of the learning rate."""
    left_out, groups = set(without), defaultdict(list)
    for p in model.parameters():
        if p.requires_grad and p not in left_out:
            groups[len(shape_of(p)) < 2, lr_factors.get(p, 1.0)].append(p)
    return [
        {"params": params, "weight_decay": 0.0 if is_scale else weight_decay, "lr_factor": factor}
        for (is_scale, factor), params in sorted(groups.items())
    ]


def muon_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the blocks' trained matrices. A and B of a LoRA adapter are separate matrices. In
    a block with experts, w1, w2 and w3 are one parameter each, (experts, rows, cols)."""
    return [p for p in model.layers.parameters() if p.requires_grad and p.dim() > 1]


def build_optimizer(model: nn.Module, args: TrainingArguments, engine: Engine):
    """Return the optimizer for `accelerator.prepare`; call `set_muon_layout` after that. If
    DeepSpeed's configuration has an "optimizer", DeepSpeed creates it: return a placeholder."""
    adam = {"betas": (args.beta1, args.beta2), "eps": ADAM_EPS}
    matrices = muon_matrices(model) if args.optimizer == "muon" else []
    factors = {model.tok_embeddings.weight: args.embedding_lr_factor}
    if not model.config.tie_embeddings:
        factors[model.output.weight] = args.output_lr_factor
    groups = parameter_groups(model, args.weight_decay, matrices, factors)
    if matrices:
        by_muon = {
            "params": matrices,
            "algorithm": "muon",
            "momentum": args.muon_momentum,
            "equal_rows": True,  # a resumed run has the value of its checkpoint
            "weight_decay": args.weight_decay,
            "lr_factor": args.muon_learning_rate / args.learning_rate,
        }
        # Without bf16, Muon computes in fp32: small gradients would become zero in fp16.
        in_fp32 = args.dtype == "float32" or (torch.cuda.is_available() and not has_bf16())
        dtype = torch.float32 if in_fp32 else torch.bfloat16
        return Muon([by_muon, *(group | adam for group in groups)], args.learning_rate, dtype)
    if "optimizer" in (engine.deepspeed or {}):
        from accelerate.utils import DummyOptim  # Accelerate has it only if DeepSpeed is installed

        return DummyOptim(groups, lr=args.learning_rate, weight_decay=args.weight_decay)
    return torch.optim.AdamW(groups, lr=args.learning_rate, fused=True, **adam)


def set_muon_layout(model: nn.Module, engine: Engine) -> None:
    """Under DeepSpeed, tell Muon where each matrix lies in the flat tensors that Muon updates."""
    if engine.deepspeed and isinstance(muon := model.optimizer.optimizer, Muon):
        for partition in partitions(model.optimizer, engine.accelerator.process_index):
            muon.layout[partition.fp32] = partition


def orthogonalize(x: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix to each matrix of x (batch, rows, cols). Each
    iteration X ← aX + b(XXᵀ)X + c(XXᵀ)²X maps a singular value σ to aσ + bσ³ + cσ⁵."""
    tall = x.shape[1] > x.shape[2]
    x = normalize(x, dim=(1, 2), eps=1e-7)  # makes all singular values at most 1
    for a, b, c in NEWTON_SCHULZ:
        gram = x.mT @ x if tall else x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, gram, beta=a) if tall else torch.baddbmm(x, gram, x, beta=a)
    return x


def with_equal_rows(x: Tensor) -> Tensor:
    """Give the rows of each matrix of x (batch, rows, cols) one norm, or the columns if it is wide,
    as Muon+ does (https://arxiv.org/abs/2602.21545). Without zero rows it keeps its norm."""
    norms = x.norm(dim=2 if x.shape[1] >= x.shape[2] else 1, keepdim=True)
    return x * (norms.square().mean((1, 2), keepdim=True).sqrt() / norms.clamp_min(1e-7))


class Piece(NamedTuple):
    """The weights of one parameter that this process updates: all of them, or a share of ZeRO."""

    whole: Tensor  # the momenta of whole matrices, (rows, cols) or (experts, rows, cols)
    weights: Tensor  # (n,), a view
    place: slice  # of these weights in the flattened matrices


class Muon(torch.optim.AdamW):
    """Update groups with "algorithm": "muon" by Muon, and all other groups by fused AdamW.
    A Muon group has matrices, a "momentum" and "equal_rows"; `dtype` is for orthogonalising."""

    def __init__(self, groups: list[dict], lr: float, dtype: torch.dtype):
        super().__init__([{"algorithm": "adamw"} | group for group in groups], lr=lr, fused=True)
        self.dtype = dtype
        self.layout: dict[Tensor, Partition] = {}  # under ZeRO: flat tensor → its parameters

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters; every process must call it. Set Muon's gradients to None, so that
        AdamW skips these matrices. As in AdamW, a nonzero tensor `found_inf` skips the step."""
        if getattr(self, "found_inf", False):
            return
        for group in self.param_groups:
            updated = [p for p in group["params"] if p.grad is not None]
            if updated and group["algorithm"] == "muon":
                self._step_muon(group, updated)
                for p in updated:
                    p.grad = None
        super().step()

    def _step_muon(self, group: dict, updated: list[Tensor]) -> None:
        """Update the tensors of a Muon group. The momentum overwrites their gradients."""
        momenta = [state_of(self, group, p)["momentum_buffer"] for p in updated]
        gradients = [p.grad for p in updated]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        torch._foreach_lerp_(gradients, momenta, group["momentum"])  # Nesterov's momentum
        if group["weight_decay"]:
            torch._foreach_mul_(updated, 1 - group["lr"] * group["weight_decay"])
        pieces = [piece for p in updated for piece in self._pieces(p)]
        for batch in _batches(piece.whole for piece in pieces):
            x = orthogonalize(torch.stack([matrix.to(self.dtype) for matrix in batch]))
            x = with_equal_rows(x) if group["equal_rows"] else x
            torch._foreach_copy_(batch, [*x])  # the momentum becomes the direction of the update
        for whole, weights, place in pieces:
            rows, cols = whole.shape[-2:]
            scale = max(1, rows / cols) ** 0.5  # as adjust_lr_fn="original" in torch.optim.Muon
            weights.add_(whole.flatten()[place], alpha=-group["lr"] * scale)

    def _pieces(self, p: Tensor) -> list[Piece]:
        """Return the pieces of p, whose gradient is its momentum. Under ZeRO p is flat, and the
        momenta of matrices that lie on several processes are gathered: all must call this."""
        if p not in self.layout:
            return [Piece(p.grad, p.view(-1), slice(None))]
        pieces, parts = [], self.layout[p].parts
        sizes = [part.parameter.numel() for part in parts if part.split]
        gathered = p.grad.new_zeros(sum(sizes), dtype=self.dtype)
        wholes = iter(gathered.split(sizes))
        for part in parts:
            whole = mine = p.grad[part.in_partition]
            if part.split:
                whole = next(wholes)
                whole[part.in_parameter] = mine
            if len(mine):
                matrices, place = whole.view(-1, *part.parameter.shape[-2:]), part.in_parameter
                size = matrices[0].numel()
                first = place.start // size  # experts before this one belong to other processes
                matrices = matrices[first : math.ceil(place.stop / size)]
                place = slice(place.start - first * size, place.stop - first * size)
                pieces.append(Piece(matrices, p.view(-1)[part.in_partition], place))
        if sizes:  # on every process or on none
            torch.distributed.all_reduce(gathered)  # exact: one process adds a number, others zero
        return pieces


def _batches(momenta: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of matrices of one shape: up to BATCH_ELEMENTS elements, or one larger matrix."""
    by_shape = defaultdict(list)
    for momentum in momenta:
        shape = momentum.shape[-2:]
        by_shape[shape] += momentum.view(-1, *shape)
    for shape, same in by_shape.items():
        count = max(1, BATCH_ELEMENTS[same[0].device.type] // shape.numel())
        for first in range(0, len(same), count):
            yield same[first : first + count]
