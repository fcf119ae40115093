"""Muon for the matrices of a network's hidden layers, with AdamW for everything else.

Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/) replaces the average gradient of a
matrix by the nearest orthogonal matrix. It computes what `torch.optim.Muon` does. Matrices of one
shape are orthogonalised together. Under ZeRO a process steps a flat partition that begins and ends
within matrices; these are made whole first.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from training.engine.partition import Part, Partition
from training.engine.state import state_of

# (a, b, c) of every iteration: singular values from 0.0015 to 1 come to lie between 0.68 and 1.20.
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
# Elements orthogonalised at once: they stay in a CPU's caches, or keep a GPU busy.
BATCH_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}


def orthogonalize(x: Tensor) -> Tensor:
    """Return nearly the nearest matrices with orthonormal rows or columns to x (batch, rows, cols).

    The quintic Newton-Schulz iteration X ← aX + b(XXᵀ)X + c(XXᵀ)²X acts on singular values as the
    polynomial aσ + bσ³ + cσ⁵. XXᵀ is of the shorter side.
    """
    tall = x.shape[1] > x.shape[2]
    x = normalize(x, dim=(1, 2), eps=1e-7)  # no singular value above 1
    for a, b, c in NEWTON_SCHULZ:
        gram = x.mT @ x if tall else x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, gram, beta=a) if tall else torch.baddbmm(x, gram, x, beta=a)
    return x


class Update(NamedTuple):
    matrix: Tensor  # (rows, cols), whole, before it is orthogonalised
    weights: Tensor  # the weights that this process steps, flat
    inside: slice  # their place in the flattened matrix


class Muon(torch.optim.AdamW):
    """Step groups with "algorithm": "muon", which hold matrices and "momentum", by Muon, and drop
    their gradients; step the others as torch.optim.AdamW(fused=True). `dtype` is the precision in
    which to orthogonalise.
    """

    def __init__(self, groups: list[dict], lr: float, dtype: torch.dtype):
        super().__init__([{"algorithm": "adamw"} | group for group in groups], lr=lr, fused=True)
        self.dtype = dtype
        self.layout: dict[Tensor, Partition] = {}  # under ZeRO: flat tensor → what lies in it

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step all groups. Under ZeRO every process must call it. Nothing changes where the tensor
        `found_inf` is set and not zero, as with AdamW; asking waits for the GPU."""
        if getattr(self, "found_inf", False):
            return
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            if stepped and group["algorithm"] == "muon":
                self._step_muon(group, stepped)
                for p in stepped:
                    p.grad = None
        super().step()

    def _step_muon(self, group: dict, stepped: list[Tensor]) -> None:
        momenta = [state_of(self, group, p)["momentum_buffer"] for p in stepped]
        gradients = [p.grad for p in stepped]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        torch._foreach_lerp_(gradients, momenta, group["momentum"])  # Nesterov's momentum
        if group["weight_decay"]:
            torch._foreach_mul_(stepped, 1 - group["lr"] * group["weight_decay"])
        for batch in _batches([update for p in stepped for update in self._updates(p)]):
            rows, cols = batch[0].matrix.shape
            # torch's "original" scale: rows of a tall result have a root mean square of 1, too
            scale = max(1, rows / cols) ** 0.5
            x = torch.stack([update.matrix.to(self.dtype) for update in batch])
            for update, matrix in zip(batch, orthogonalize(x), strict=True):
                direction = matrix.flatten()[update.inside]
                update.weights.add_(direction, alpha=-group["lr"] * scale)

    def _updates(self, p: Tensor) -> Iterator[Update]:
        """Yield the updates of matrices in p of which this process steps any weights."""
        weights, gradient = p.view(-1), p.grad
        if p not in self.layout:
            yield Update(gradient, weights, slice(None))
            return
        parts = self.layout[p].parts
        gathered = iter(self._gather([part for part in parts if part.split], gradient))
        for part in parts:
            update = next(gathered) if part.split else gradient[part.in_partition]
            if part.numel:
                matrix = update.view_as(part.parameter)
                yield Update(matrix, weights[part.in_partition], part.in_parameter)

    def _gather(self, parts: list[Part], gradient: Tensor) -> Sequence[Tensor]:
        """Return flat copies of the matrices that ZeRO splits (at most processes - 1)."""
        if not parts:
            return []
        sizes = [part.parameter.numel() for part in parts]
        whole = gradient.new_zeros(sum(sizes), dtype=self.dtype)
        matrices = whole.split(sizes)
        for part, matrix in zip(parts, matrices, strict=True):
            matrix[part.in_parameter] = gradient[part.in_partition]
        torch.distributed.all_reduce(whole)  # exact: all but one of the summands are zero
        return matrices


def _batches(updates: list[Update]) -> Iterator[list[Update]]:
    """Yield matrices of one shape, as many as should be orthogonalised at once."""
    by_shape = defaultdict(list)
    for update in updates:
        by_shape[update.matrix.shape].append(update)
    for shape, same in by_shape.items():
        count = max(1, BATCH_ELEMENTS[same[0].matrix.device.type] // shape.numel())
        for first in range(0, len(same), count):
            yield same[first : first + count]
