"""LoRA: trained matrices stay as they are, and beside each a product of two thin ones is trained.

y = W x + (alpha / dim) · B A x, with A of shape (dim, in) and B of shape (out, dim). Source: Hu et
al., https://arxiv.org/abs/2106.09685. Scaling and first values are those of PEFT: B begins with
zeros, so that training begins with what the base computes. DeepSpeed-Chat has the same flags, but
its scaling is 1 / dim.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import ConfigError
from model.transformer import Transformer

FACTORS = ("lora_a", "lora_b")


@dataclass(frozen=True)
class LoRA:
    """Which layers have adapters, and how much these weigh."""

    dim: int  # inner dimension, the rank
    alpha: float
    module_name: str  # a part of the layers' names
    only_lora: bool  # whether nothing else is trained

    @property
    def scaling(self) -> float:
        return self.alpha / self.dim


class LoRALinear(nn.Linear):
    """A linear layer with an adapter; `weight` is frozen, and keeps its name."""

    def __init__(self, base: nn.Linear, lora: LoRA):
        nn.Module.__init__(self)  # Linear's own would make another weight
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, None
        self.scaling = lora.scaling
        self.weight = base.weight.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.empty(lora.dim, self.in_features))
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, lora.dim))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.linear(x, self.lora_a) * self.scaling  # (..., dim)
        return F.linear(x, self.weight) + F.linear(inner, self.lora_b)


def add_lora(
    model: Transformer, *, dim: int, alpha: float, module_name: str = "layers", only_lora: bool
) -> Transformer:
    """Give adapters to the linear layers whose names contain `module_name`, in place, and freeze
    their weights; with `only_lora` everything else too. Raises ConfigError."""
    if not 1 <= dim <= model.config.dim:
        raise ConfigError(f"lora_dim must be from 1 to dim, {model.config.dim}, not {dim}")
    if not 0 < alpha < math.inf:
        raise ConfigError(f"lora_alpha must be positive and finite, not {alpha!r}")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    chosen = {name: layer for name, layer in layers.items() if module_name in name}
    if not chosen:
        names = ", ".join(list(layers)[:7])
        raise ConfigError(f"lora_module_name {module_name!r} is no part of any of {names}, ...")
    if "output" in chosen and model.config.tie_embeddings:
        also = f"lora_module_name {module_name!r} means the output layer too"
        raise ConfigError(f"{also}, whose matrix is the embedding's: 'layers' means all others")
    lora = LoRA(dim, alpha, module_name, only_lora)
    if only_lora:
        model.requires_grad_(False)
    for name, layer in chosen.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, LoRALinear(layer, lora))
    model.lora = lora
    return model


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is a factor of an adapter."""
    return name.rpartition(".")[2] in FACTORS


def weight_of(layer: nn.Linear) -> Tensor:
    """Return the matrix, (out, in), of a linear layer with its adapter, if any."""
    if isinstance(layer, LoRALinear):
        return _merged(layer.weight, layer.lora_a, layer.lora_b, layer.scaling)
    return layer.weight


def merged_weights(weights: Mapping[str, Tensor], lora: LoRA | None) -> Mapping[str, Tensor]:
    """Return the weights of a model without adapters that computes the same."""
    return Merged(weights, lora.scaling) if lora else weights


class Merged(Mapping):
    """Weights with their adapters added, each made when it is asked for."""

    def __init__(self, weights: Mapping[str, Tensor], scaling: float):
        self._weights, self._scaling = weights, scaling

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        a, b = (f"{name.removesuffix('weight')}{factor}" for factor in FACTORS)
        if a not in self._weights:
            return weight
        return _merged(weight, self._weights[a], self._weights[b], self._scaling)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._weights if not is_adapter(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
