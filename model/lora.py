"""LoRA: freeze a pretrained matrix and train an adapter, a product of two thin matrices.

y = W x + (alpha / dim) · B A x. The rank is dim: A is (dim, in), and B is (out, dim). Source: Hu et
al., https://arxiv.org/abs/2106.09685. Scaling and initial values are as in PEFT. B starts at zero,
so at first the model computes the same as without adapters. DeepSpeed-Chat has the same flags
except lora_alpha; DeepSpeed-Chat's factor is 1 / dim.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import ConfigError
from model.transformer import Transformer


@dataclass(frozen=True)
class LoRA:
    """Settings of a model's adapters."""

    dim: int  # the rank: the inner dimension of the product B A
    alpha: float  # alpha / dim is the factor of the product B A
    module_name: str  # layers with this text in their names have adapters
    only_lora: bool  # True if only the adapters are trained

    @property
    def scaling(self) -> float:
        return self.alpha / self.dim


class LoRALinear(nn.Linear):
    """A linear layer with an adapter. The frozen matrix is still named `weight`."""

    def __init__(self, base: nn.Linear, lora: LoRA):
        nn.Module.__init__(self)  # nn.Linear.__init__ would allocate a new weight
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, None
        self.scaling = lora.scaling
        self.weight = base.weight.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.empty(lora.dim, self.in_features))
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, lora.dim))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.linear(x, self.lora_a) * self.scaling  # (..., dim)
        return F.linear(x, self.weight) + F.linear(inner, self.lora_b)


def add_lora(model: Transformer, lora: LoRA) -> Transformer:
    """Add an adapter to each linear layer with `module_name` in its name. Return the same model.

    The weights of these layers are frozen. Experts are frozen too and get no adapters: in a block
    with experts, only attention is adapted. With only_lora, all other parameters are frozen too.
    Raises ConfigError if `dim` is out of range, no layer is chosen, or a tied output layer is."""
    module_name = lora.module_name
    if not 1 <= lora.dim <= model.config.dim:
        raise ConfigError(f"lora_dim must be from 1 to dim ({model.config.dim}), not {lora.dim}")
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    chosen = {name: layer for name, layer in linear.items() if module_name in name}
    if not chosen:
        names = ", ".join(list(linear)[:7])
        raise ConfigError(f"lora_module_name {module_name!r} is in no layer's name: {names}, ...")
    if "output" in chosen and model.config.tie_embeddings:
        also = f"lora_module_name {module_name!r} selects the output layer too"
        raise ConfigError(f"{also}, which shares the embedding's matrix: pass 'layers' instead")
    if lora.only_lora:
        model.requires_grad_(False)
    for block in model.layers:
        if block.has_experts:
            block.feed_forward.requires_grad_(False)
    for name, layer in chosen.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, LoRALinear(layer, lora))
    model.lora = lora
    return model


def is_adapter(name: str) -> bool:
    """Return True for the name of a parameter that belongs to an adapter."""
    return name.endswith((".lora_a", ".lora_b"))


def weight_of(layer: nn.Linear) -> Tensor:
    """Return the matrix of a linear layer, (out, in), with its adapter added if it has one."""
    if isinstance(layer, LoRALinear):
        return _merged(layer.weight, layer.lora_a, layer.lora_b, layer.scaling)
    return layer.weight


def merged_weights(weights: Mapping[str, Tensor], lora: LoRA | None) -> Mapping[str, Tensor]:
    """Return the weights by name with all adapters added, or as they are if `lora` is None."""
    if lora is None:
        return weights
    merged = {name: weight for name, weight in weights.items() if not is_adapter(name)}
    for name, weight in merged.items():
        layer = name.removesuffix("weight")
        if f"{layer}lora_a" in weights:
            a, b = weights[f"{layer}lora_a"], weights[f"{layer}lora_b"]
            merged[name] = _merged(weight, a, b, lora.scaling)
    return merged


def _merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return W + scaling · B A in fp32."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
